"""Cells that train for real, small enough to begin at once and long enough to be stopped."""

from __future__ import annotations

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
MOVING = "canvas => Number(canvas.dataset.points) > 10"


def wait_for_points(page: Page, cell: Locator) -> Locator:
    """The live monitor in the outputs of a cell, once its curves have points."""
    monitor = cell.locator(".gpm")
    canvas = monitor.locator("canvas").nth(1)
    canvas.wait_for(timeout=60_000)
    page.wait_for(MOVING, canvas, timeout_s=60)
    return monitor
