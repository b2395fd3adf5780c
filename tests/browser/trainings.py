"""Cells that train for real, small enough to begin at once and long enough to be stopped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.page import Page

SETUP = """\
%load_ext gpupool
%gpupool start --cpu -n 2
import gpupool, ipykernel, torch
features = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(features, features[:, :4].argmax(1))
options = gpupool.TrainingOptions(epochs=1000, batch_size=32)
def train(**more):
    return gpupool.train(torch.nn.Linear(16, 4), data, options=options, **more)
"""
BUSY = "The kernel is busy. Press ■ (Interrupt) in the toolbar instead."
# Notes when the button is pressed, when the monitor tells what else to press, and tells it no more,
# and when by a timer of the same page, which stands still if the page does, 1.5 s are over.
WATCH = """(monitor, words) => {
    const times = window.gpupoolTimes = {};
    const now = () => performance.now();
    monitor.querySelector('.gpm-stop').addEventListener(
        'click', () => { setTimeout(() => { times.late ??= now(); }, 1500); }, {capture: true});
    const look = () => {
        if (monitor.textContent.includes(words)) times.told ??= now();
        else if (times.told) times.cleared ??= now();
    };
    new MutationObserver(look).observe(
        monitor, {childList: true, subtree: true, characterData: true});
}"""
MOVING = "canvas => Number(canvas.dataset.points) > 10"


def wait_for_points(page: Page, cell: Locator) -> Locator:
    """The live monitor in the outputs of a cell, once its curves have points."""
    monitor = cell.locator(".gpm")
    canvas = monitor.locator("canvas").nth(1)
    canvas.wait_for(timeout=60_000)
    page.wait_for(MOVING, canvas, timeout_s=60)
    return monitor


def press_stop(page: Page, monitor: Locator) -> None:
    """Press the monitor's Stop, with an eye on when it tells of another button."""
    monitor.evaluate(WATCH, BUSY)
    monitor.locator(".gpm-stop").click()


def wait_until_told_in_time(page: Page) -> None:
    """The words about the notebook's button come within 1.5 s, by timers; meant is one second."""
    page.raw.wait_for_function("() => window.gpupoolTimes.told", timeout=60_000)
    times = json.loads(page.raw.evaluate("() => JSON.stringify(window.gpupoolTimes)"))
    assert "late" not in times or times["told"] <= times["late"]


def wait_until_it_tells_no_more(page: Page) -> None:
    """Until the words about the notebook's button are gone, while the monitor is still there."""
    page.raw.wait_for_function("() => window.gpupoolTimes.cleared", timeout=60_000)
