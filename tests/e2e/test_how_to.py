"""The pages of docs/how-to: every block and every line of a table is executed, on two ranks.

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

import gpupool
from gpupool import Pool

FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [path.stem for path in sorted(FOLDER.glob("from-*.md"))]
SLOW = {"compile=True": pytest.mark.long}  # torch's compiler takes a minute of CPU
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


def lines(stem: str) -> Iterator[Any]:
    """Each line of the tables of a page, as a call; one that says in words that nothing is needed
    is left out."""
    head = ""
    rows = [row for row in (FOLDER / f"{stem}.md").read_text().splitlines() if row[:1] == "|"]
    for number, (row, later) in enumerate(zip(rows, [*rows[1:], ""], strict=True)):
        have, write = row.strip("|").rsplit(" | ", 1) if " | " in row else ("", "")
        if later.startswith("|---"):
            head = write.strip()
        elif write.strip().startswith("`"):
            code = write.strip().strip("`")
            if head == "`gpupool.train`":
                code = CALLS[stem].replace("**options", code)
            marks = [mark for word, mark in SLOW.items() if word in code]
            name = f"{stem}-{number}: {have.strip()[:60]}"
            yield pytest.param(stem, code, id=name, marks=marks)


class Page:
    """What a page defines. Blocks come before lines, so one may name what a later block makes."""

    def __init__(self, stem: str) -> None:
        for package in NEEDS.get(stem, ()):
            pytest.importorskip(package)
        # As in a notebook: what it defines goes to the ranks by value.
        self.names: dict[str, Any] = {"__name__": "__main__"}
        torch.manual_seed(0)
        for block in BLOCK.findall((FOLDER / f"{stem}.md").read_text()):
            exec(compile(block, f"{stem}.md", "exec"), self.names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages read and write: `photos/` has a folder for each of two classes."""
    path = tmp_path_factory.mktemp("pages")
    for number in range(12):
        photo = path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 50, 90)).save(photo)
    return path


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
@pytest.mark.parametrize(("stem", "code"), [line for stem in PAGES for line in lines(stem)])
def test_a_line_is_executed(
    pool2: Pool,
    folder: Path,
    pages: dict[str, Page],
    monkeypatch: pytest.MonkeyPatch,
    stem: str,
    code: str,
) -> None:
    monkeypatch.chdir(folder)
    pool2.run(os.chdir, str(folder))
    if stem not in pages:
        pages[stem] = Page(stem)
    exec(compile(code, f"{stem}.md", "exec"), pages[stem].names)


def test_every_page_is_linked_and_named_in_the_readme() -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text()
    assert PAGES == ["from-hugging-face", "from-keras", "from-lightning", "from-pytorch"]
    assert [stem for stem in PAGES if f"docs/how-to/{stem}.md" not in readme] == []
    assert gpupool.__all__
