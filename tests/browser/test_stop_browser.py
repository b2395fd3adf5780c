"""The Stop button and the notebook's own, in front ends and kernels that hear in different ways.

Where a press of Stop cannot arrive while its cell runs, the page presses the notebook's button,
once. While another cell runs it does not, and says what to press.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import SETUP
from tests.support.processes import until

if TYPE_CHECKING:
    from tests.browser.lab import App, Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

WAYS = {  # of waiting for a training: the cell
    "blocking": "result = train()",
    "returned": "run = train(wait=False)",
}
# The kernel is deaf until there is a file of this name; then it hears what was pressed meanwhile.
DEAF = """\
import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("enough").exists():
    time.sleep(0.05)"""
BUSY = "The kernel is busy. Press ■ (Interrupt) in the toolbar instead."
REPORT = """\
result = run.result() if "run" in globals() else result
print(result.stopped_by, type(result.model).__name__)"""


BUILD = Path(__file__).parents[2] / "build"
CASES = [  # ipykernel ("": the one that is installed), front end, whether it uses subshells
    ("", "lab", True),
    ("", "lab", False),
    ("6.31.0", "lab", True),
    ("7.3.0", "notebook", True),
]


def kernel_of(lab: Lab, version: str) -> str:
    if not version:
        return "python3"
    folder = BUILD / f"ipykernel-{version}"
    if not folder.is_dir():
        pytest.skip(f"ipykernel {version} is not in {folder}: make long puts it there")
    return lab.add_kernel(folder.name, folder)


def opened(lab: Lab, browser: Browser, version: str, app: App, subshells: bool) -> Page:
    kernel = kernel_of(lab, version)
    lab.use_subshells(subshells)
    cells = [SETUP + "print(ipykernel.__version__)"]
    for source in [*WAYS.values(), WAYS["blocking"], WAYS["returned"]]:
        cells += [source, REPORT + "\n_ = globals().pop('run', None)"]
    cells.append(DEAF)
    name = lab.write(f"stop-{version}-{app}-{subshells}.ipynb", cells, kernel)
    page = browser.open(lab, name, app=app)
    page.run_cell(0)
    page.wait_idle()
    page.wait_text(0, version)
    return page


def is_stopped(page: Page, index: int) -> None:
    """The training of a cell ends with its still picture, without an error, network in hand."""
    still = page.cell(index).locator(".gpupool-training")
    still.wait_for(timeout=60_000)
    assert still.inner_text().startswith("Stopped after step ")
    page.run_cell(index + 1)
    page.wait_idle()
    page.wait_text(index + 1, "user Linear")
    errors = page.cell(index).locator("[data-mime-type='application/vnd.jupyter.stderr']")
    assert errors.count() == 0, page.text(index)
    assert page.text(index + 1) == "user Linear"


@pytest.mark.parametrize(("version", "app", "subshells"), CASES)
def test_both_stop_buttons(
    lab: Lab, browser: Browser, version: str, app: App, subshells: bool
) -> None:
    page = opened(lab, browser, version, app, subshells)
    for number in range(len(WAYS)):
        index = 1 + 2 * number
        page.run_cell(index)
        # where the kernel does not hear it, the page presses the notebook's button a second later
        page.wait_for_points(index).locator("[data-press=stop]").click()
        is_stopped(page, index)
    index = 1 + 2 * len(WAYS)
    if subshells:  # by the tool bar alone
        page.run_cell(index)
        page.wait_for_points(index)
        page.interrupt()
    else:
        index += 2
        hears_later(page, index, lab)
    is_stopped(page, index)


def hears_later(page: Page, index: int, lab: Lab) -> None:
    """A press while another cell runs leaves that alone; it is heard after it; the hint goes."""
    page.run_cell(index)
    monitor = page.wait_for_points(index)
    page.wait_idle()
    page.run_cell(index + 2)
    began, enough = lab.path("began"), lab.path("enough")
    # The page shows that a cell runs before it has sent it.
    until(began.exists, 20, "the cell runs")
    monitor.locator("[data-press=stop]").click()
    monitor.get_by_text(BUSY).wait_for(timeout=60_000)
    enough.touch()
    monitor.get_by_text(BUSY).wait_for(state="detached", timeout=60_000)
    page.wait_idle()
    assert page.js("return nb.content.widgets[arg].model.outputs.length;", index + 2) == 0
    began.unlink()
    enough.unlink()  # other cases wait for it too
