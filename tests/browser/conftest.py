"""A JupyterLab and a browser for the tests of this folder, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Browser, Lab

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """Where pictures go that people look at."""
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium. Stopped before other tests: it runs an event loop in this thread."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    from tests.browser.lab import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab as it comes."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    from tests.browser.lab import Lab

    with Lab(tmp_path_factory.mktemp("lab"), ROOT) as started:
        yield started
