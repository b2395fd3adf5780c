"""A kernel that is killed under monitors: what the page says, what the file keeps."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

SETUP = """
import os, threading, time
from gpupool.core.wire.events import ProgressEvent
from gpupool.notebook.monitor.live import LiveMonitor
from tests.notebook.feed import Run, full_events, history_of
shown = []
def show(num_steps, aside=None):
    history = history_of(full_events(num_epochs=4, num_steps=num_steps) if num_steps else ())
    if aside:
        history.add(aside)
    shown.append(LiveMonitor(lambda: None, history))
print(os.getpid())
"""
# Each phase of a training stands still in a monitor of its own; the last one moves, and blocks.
PHASES = {
    "starting": 'show(0, aside=ProgressEvent("waiting for the ranks", 0, 0))',
    "training": "show(40)",
}
MOVES = """
run = Run(0.02, num_epochs=100)
run.add_listener(LiveMonitor(run.stop, run.history))
run.wait()"""
BLOCKING = 1 + len(PHASES)
MOVING = "canvas => Number(canvas.dataset.points) > 10"


def shows_the_end(page: Page, index: int, phase: str) -> None:
    """The still picture of a cell says at which step the kernel stopped, and has no button."""
    page.cell(index).scroll_into_view_if_needed()
    said = "before the first step" if phase == "starting" else "at step 40"
    said = f"The kernel stopped {said}, and the training with it"
    still = page.cell(index).locator(".gpm", has_text=said)
    still.wait_for(timeout=60_000)
    assert phase == "starting" or still.locator("canvas, img").count() >= 1
    assert page.cell(index).locator("[data-press=stop]").count() == 0


def test_a_kernel_that_is_killed_leaves_the_curves_of_each_phase(
    lab: Lab, browser: Browser
) -> None:
    name = "ends.ipynb"
    page = browser.begin(lab, name, [SETUP, *PHASES.values(), MOVES])
    page.wait_text(0, re.compile(r"\d+"))
    pid = int(page.text(0))  # now: what is scrolled away has no text
    for index in range(1, BLOCKING):
        page.run_cell(index)
    page.wait_idle()
    page.run_cell(BLOCKING)
    canvas = page.cell(BLOCKING).locator(".gpm canvas").nth(1)
    canvas.wait_for(timeout=60_000)
    page.wait_for(MOVING, canvas)
    os.kill(pid, signal.SIGKILL)
    page.raw.locator(".jp-Dialog .jp-mod-accept").click(timeout=60_000)  # the front end says so too
    for index, phase in enumerate(PHASES, 1):
        shows_the_end(page, index, phase)
    page.cell(BLOCKING).scroll_into_view_if_needed()
    said = re.compile(r"The kernel stopped (at step|before)")
    page.cell(BLOCKING).locator(".gpm", has_text=said).wait_for(timeout=60_000)

    page.save()
    page.shut_kernel_down()
    outputs = nbformat.read(lab.path(name), as_version=4).cells[2].outputs  # type: ignore[no-untyped-call]
    assert list(outputs[0].data) == ["text/html", "text/plain"]
    assert "The kernel stopped at step 40" in outputs[0].data["text/html"]
    page.reopen_without_kernel(name)
    for index, phase in enumerate(PHASES, 1):
        shows_the_end(page, index, phase)
