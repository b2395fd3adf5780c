"""The pages of docs/how-to, and a guide: what they name is there, and all of it is executed.

A table whose last column is headed `gpupool.train` has calls, or options of one: these are given
to a training of the page's network on its data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gpupool import Pool

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
GUIDES = FOLDER.parent / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [path.stem for path in sorted(FOLDER.glob("from-*.md"))]
NEEDS = {
    "from-hugging-face": ("transformers", "datasets", "peft"),
    "from-lightning": ("pytorch_lightning",),
}
# Where the last column has options alone, what they are given to.
CALLS = {
    "from-hugging-face": "gpupool.train(classifier, texts, collate=with_padding, **options)",
    "from-lightning": "gpupool.train(Classifier(), data, **options)",
    "from-keras": "gpupool.train(model, data, **options)",
}


def blocks(stem: str) -> list[str]:
    return BLOCK.findall((FOLDER / f"{stem}.md").read_text())


def lines(stem: str) -> Iterator[str]:
    """Each line of the tables of a page, as a call; one that says in words that nothing is needed
    is left out."""
    head = ""
    rows = [row for row in (FOLDER / f"{stem}.md").read_text().splitlines() if row[:1] == "|"]
    for row, later in zip(rows, [*rows[1:], ""], strict=True):
        _, write = row.strip("|").rsplit(" | ", 1) if " | " in row else ("", "")
        if later.startswith("|---"):
            head = write.strip()
        elif write.strip().startswith("`"):
            code = write.strip().strip("`")
            if head == "`gpupool.train`":
                code = CALLS[stem].replace("**options", code)
            yield code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the pages read and write: `photos/` has a folder for each of two classes."""
    for number in range(12):
        photo = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 50, 90)).save(photo)
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
@pytest.mark.parametrize("stem", PAGES)
def test_a_page_is_executed(
    pool2: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    """Blocks before lines, so that a line may name what a later block makes."""
    for package in NEEDS.get(stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(folder)
    pool2.run(os.chdir, str(folder))
    # As in a notebook: what it defines goes to the ranks by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    for number, code in enumerate([*blocks(stem), *lines(stem)]):
        try:
            exec(compile(code, f"{stem}.md", "exec"), names)
        except Exception as error:
            error.add_note(f"in piece {number} of {stem}.md: {code}")
            raise


def execute_guide(stem: str, names: dict[str, Any]) -> None:
    for code in BLOCK.findall((GUIDES / f"{stem}.md").read_text()):
        if not code.startswith("%"):
            exec(compile(code, f"{stem}.md", "exec"), names)


def test_the_guide_of_the_doctor_is_executed(
    pool2: Pool, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    execute_guide("why-slow", names)
    assert [size.num_ranks for size in names["measured"].sizes] == [1, 2]
    assert names["result"].profile.rows


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_guide_of_many_networks_is_executed(
    pool2: Pool, names: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    pool2.run(os.chdir, str(folder))
    torch.manual_seed(0)
    execute_guide("many-networks", names)
    assert len(names["trained"]) == len(names["nets"])
    assert names["squares"] == [n**2 for n in range(8)]
    assert [len(names["heard"]), names["error"].first.ename] == [3, "ZeroDivisionError"]


def test_every_page_is_named_in_the_readme() -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text()
    assert [stem for stem in PAGES if f"docs/how-to/{stem}.md" not in readme] == []
