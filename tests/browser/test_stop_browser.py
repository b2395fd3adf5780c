"""The Stop button and the notebook's own, in front ends and kernels that hear in different ways.

Where a press of Stop cannot arrive while its cell runs, the page presses the notebook's button,
once. While another cell runs it does not, and says what to press.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.browser.kernels import kernel_of
from tests.browser.trainings import (
    SETUP,
    press_stop,
    wait_for_points,
    wait_until_it_tells_no_more,
    wait_until_told_in_time,
)
from tests.support.processes import until

if TYPE_CHECKING:
    from tests.browser.lab import App, Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

WAYS = {  # of waiting for a training: the cell
    "blocking": "result = train()",
    "awaiting": "result = await train(wait=False)",
    "returned": "run = train(wait=False)",
}
# The kernel is deaf until there is a file of this name; then it hears what was pressed meanwhile.
DEAF = """\
import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("enough").exists():
    time.sleep(0.05)"""
REPORT = """\
result = run.result() if "run" in globals() else result
print(result.stopped_by, type(result.model).__name__)"""


@dataclass(frozen=True)
class Case:
    """A kernel of some version in some front end: they hear Stop in some cells, or in all."""

    ipykernel: str  # "": the one that is installed
    app: App
    subshells: bool

    def __str__(self) -> str:
        version = self.ipykernel or "installed"
        return f"{version}-{self.app}{'' if self.subshells else '-no_subshells'}"


CASES = [Case("", "lab", True), Case("", "lab", False)]
LONG_CASES = [  # Notebook 7 has no setting that turns subshells off
    Case("6.31.0", "lab", True),
    Case("", "notebook", True),
    Case("7.3.0", "lab", True),
    Case("7.3.0", "notebook", True),
    Case("7.3.0", "lab", False),
    Case("6.31.0", "notebook", True),
]


@pytest.fixture
def page(request: pytest.FixtureRequest, lab: Lab, browser: Browser) -> Page:
    """A notebook of the case, its pool started."""
    case: Case = request.param
    kernel = kernel_of(lab, case.ipykernel)
    lab.use_subshells(case.subshells)
    cells = [SETUP + "print(ipykernel.__version__)"]
    for source in [*WAYS.values(), WAYS["blocking"], WAYS["awaiting"], WAYS["returned"]]:
        cells += [source, REPORT + "\n_ = globals().pop('run', None)"]
    cells.append(DEAF)
    name = lab.write(f"{case}.ipynb", cells, kernel)
    opened = browser.open(lab, name if case.ipykernel else lab.lend_kernel(name), app=case.app)
    opened.run_cell(0)
    opened.wait_idle()
    opened.wait_text(0, case.ipykernel)
    return opened


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


def parameters(cases: list[Case], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(case, case, id=str(case), marks=marks) for case in cases]


@pytest.mark.parametrize(
    ("page", "case"),
    parameters(CASES) + parameters(LONG_CASES, pytest.mark.long),
    indirect=["page"],
)
def test_both_stop_buttons(page: Page, case: Case, lab: Lab) -> None:
    for number in range(len(WAYS)):
        index = 1 + 2 * number
        page.run_cell(index)
        # where the kernel does not hear it, the page presses the notebook's button a second later
        press_stop(page, wait_for_points(page, page.cell(index)))
        is_stopped(page, index)
    index = 1 + 2 * (len(WAYS) + 2)
    if not case.subshells:
        hears_later(page, index, lab)
        is_stopped(page, index)
        return
    for number in range(len(WAYS), len(WAYS) + 2):  # by the tool bar alone
        index = 1 + 2 * number
        page.run_cell(index)
        wait_for_points(page, page.cell(index))
        page.interrupt()
        is_stopped(page, index)


def hears_later(page: Page, index: int, lab: Lab) -> None:
    """A press while another cell runs leaves that alone; it is heard after it; the hint goes."""
    page.run_cell(index)
    monitor = wait_for_points(page, page.cell(index))
    page.wait_idle()
    page.run_cell(index + 2)
    began, enough = lab.path("began"), lab.path("enough")
    # The page shows that a cell runs before it has sent it.
    until(began.exists, 20, "the cell runs")
    press_stop(page, monitor)
    wait_until_told_in_time(page)
    enough.touch()
    wait_until_it_tells_no_more(page)
    page.wait_idle()
    assert page.js("return nb.content.widgets[arg].model.outputs.length;", index + 2) == 0
    began.unlink()
    enough.unlink()  # other cases wait for it too
