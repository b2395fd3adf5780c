"""The pages of docs/guides: their Python is executed in a real kernel, in the order of the page.

What a page only shows is marked `py` there. docs/guides/use-a-network.md has its test in
tests/training/test_predict.py.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.notebook.kernel import Kernel

pytestmark = pytest.mark.long

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(page.stem for page in GUIDES.glob("*.md") if BLOCK.search(page.read_text()))
PAGES.remove("use-a-network")
OPTIONAL = ("transformers", "pytorch_lightning")
# What is known when a page has been executed.
GIVES = {
    "cells": ("total[0].item(), gpupool.current_pool()['y'][1]", "(21, 10)"),
    "many-networks": (
        "len(trained), len(heard), error.first.ename, squares[7], len(result.table())",
        "(4, 3, 'ZeroDivisionError', 49, 4)",
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
    """With a pool of two ranks; `photos/`, where it works, has a folder for each of two classes."""
    folder = tmp_path_factory.mktemp("guides")
    for number in range(32):
        photo = folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (7 * number, 50, 90)).save(photo)
    with Kernel() as kernel:
        kernel.run(f"%cd {folder}")
        assert kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2").errors == []
        yield kernel


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_guide_is_executed(kernel: Kernel, name: str) -> None:
    kernel.run("%reset -f")
    for code in BLOCK.findall((GUIDES / f"{name}.md").read_text()):
        if "%gpupool start" not in code and not is_missing(code):  # the pool is there
            done = kernel.run(code, timeout_s=300)
            assert done.errors == [], f"{code}\n{done.error_text}"
    if name in GIVES:
        expression, shown = GIVES[name]
        assert kernel.run(expression).text == shown
