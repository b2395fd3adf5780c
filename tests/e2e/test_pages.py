"""README and the other pages: what they name is there, and their code is code.

The Python of docs/guides is executed in a real kernel, in the order of the page. What a page only
shows is marked `py` there.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image

import gpupool
from demo import options_page
from gpupool.notebook.magics.arguments import COMMANDS
from tests.notebook.kernel import Kernel

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_links_is_there_and_its_code_names_what_is_public(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    near = [link for link in links if "://" not in link]
    assert [link for link in near if not (page.parent / link).exists()] == []
    for code in re.findall(r"^```py(?:thon)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        cell = code.split("\n", 1)[1] if code.startswith("%%spmd") else code
        tree = ast.parse(TransformerManager().transform_cell(cell))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in names if ast.unparse(node.value) == "gpupool"}
        assert used <= set(gpupool.__all__)


def test_it_names_every_command() -> None:
    # `status` is what %gpupool alone does
    named = set(re.findall(r"\w+", README.split("## At a glance")[1].split("```")[1]))
    assert set(COMMANDS) - named == {"status"}


def test_the_page_of_the_options_is_that_of_their_docstrings() -> None:
    assert options_page.PAGE.read_text() == options_page.text(), "run python -m demo.options_page"


# ---- guides, executed ---------------------------------------------------------------------------

GUIDES = ROOT / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXECUTED = sorted(page.stem for page in GUIDES.glob("*.md") if BLOCK.search(page.read_text()))
OPTIONAL = ("transformers", "pytorch_lightning")
# What a page takes for granted.
GIVEN = {
    "use-a-network": """
import gpupool, numpy, torch
from PIL import Image
def make_network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
network, image, array = make_network(), Image.new("RGB", (9, 9)), numpy.zeros((16, 16, 3), "uint8")
tensor = torch.zeros(2, 3, 16, 16)
train = validation = test = gpupool.ImageDatastore("photos").with_normalization(0.5, 0.25)
other = gpupool.train(make_network(), train, epochs=1)
"""
}
# What is known when a page has been executed.
GIVES = {
    "cells": ("total[0].item(), gpupool.current_pool()['y'][1]", "(21, 10)"),
    "many-networks": (
        "len(trained), len(heard), error.first.ename, squares[7], len(result.table())",
        "(4, 3, 'ZeroDivisionError', 49, 4)",
    ),
    "use-a-network": (
        "result.classes, network.gpupool.classes, len(names), len(frame), tuple(scores.shape), "
        "sorted(weights)",
        "(('cat', 'dog'), ('cat', 'dog'), 16, 2, (2, 2), ['1.bias', '1.weight'])",
    ),
    "train": ("type(result.model).__name__, result.stopped_by", "('ResNet', 'epochs')"),
    "why-slow": (
        "[size.num_ranks for size in measured.sizes], bool(result.profile.rows)",
        "([1, 2], True)",
    ),
}


def is_missing(code: str) -> bool:
    """Whether a block imports what only `make long` installs, and what is not installed here."""
    named = [package for package in OPTIONAL if package in code]
    return any(importlib.util.find_spec(package) is None for package in named)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """With a pool of two ranks; where it works `photos/` has two classes, and `new/` none."""
    folder = tmp_path_factory.mktemp("guides")
    for number in range(32):
        photo = folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (7 * number, 50, 90)).save(photo)
    shutil.copytree(folder / "photos" / "dog", folder / "new")
    with Kernel() as kernel:
        kernel.run(f"%cd {folder}")
        assert kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2").errors == []
        yield kernel


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXECUTED)
def test_the_python_of_a_guide_is_executed(kernel: Kernel, name: str) -> None:
    kernel.run("%reset -f")
    blocks = BLOCK.findall((GUIDES / f"{name}.md").read_text())
    for code in [GIVEN.get(name, "pass"), *(block.replace("s3://bucket", ".") for block in blocks)]:
        if "%gpupool start" not in code and not is_missing(code):  # the pool is there
            done = kernel.run(code, timeout_s=300)
            assert done.errors == [], f"{code}\n{done.error_text}"
    if name in GIVES:
        expression, shown = GIVES[name]
        assert kernel.run(expression).text == shown
