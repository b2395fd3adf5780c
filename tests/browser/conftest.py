"""A Jupyter server and a browser for the tests of this folder, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Lab
    from tests.browser.page import Browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def shared_browser() -> Iterator[Browser]:
    """Stopped before the tests of other folders: it runs an event loop in this thread."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    from tests.browser.page import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with Browser() as started:
        yield started


@pytest.fixture(scope="package")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    from tests.browser.lab import Lab

    with Lab(tmp_path_factory.mktemp("lab"), ROOT) as started:
        yield started


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """A headless Chromium, the same for all; a test's pages are closed after it."""
    yield shared_browser
    shared_browser.close_pages()


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    """JupyterLab and Notebook 7 as they come, one server for all; a test's kernels end with it."""
    shared_lab.use_subshells(True)
    yield shared_lab
    shared_lab.shut_kernels_down()
