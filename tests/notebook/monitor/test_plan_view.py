"""How a plan shows in a notebook, and what its curve is."""

from __future__ import annotations

import re

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.utils.data import TensorDataset

from gpupool import TrainingOptions
from gpupool.core.options.plan import TrainingPlan
from gpupool.notebook import formatters
from gpupool.notebook.monitor import plan_view
from gpupool.pool import session

DATA = TensorDataset(torch.zeros(1000, 4), torch.zeros(1000))


def plan(**values: object) -> TrainingPlan:
    return TrainingOptions(**values).explain(nn.Linear(4, 2), DATA, pool=2)


def test_a_notebook_draws_it_and_a_terminal_prints_it() -> None:
    shell = InteractiveShell()
    formatters.register(shell)
    shown = plan(schedule="cosine", warmup=8, checkpoint="s3://b/<run>", resume="auto")
    bundle, _ = shell.display_formatter.format(shown)  # type: ignore[union-attr]
    assert bundle["text/plain"] == str(shown)
    html = bundle["text/html"]
    assert "s3://b/&lt;run&gt;" in html
    assert html.count("<svg") == 1
    cells = re.findall(r"<td[^>]*>(\d|CPU|64 samples a step)</td>", html)
    assert cells == ["0", "CPU", "64 samples a step", "1", "CPU", "64 samples a step"]


def test_the_curve_begins_and_ends_where_the_rates_do() -> None:
    svg = plan_view.curve_svg(plan(schedule="polynomial", lr=0.5, warmup=10, warmup_factor=0.0))
    line = re.search(r'<polyline[^>]*points="([^"]+)"', svg)
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line[1].split()]
    assert points[0] == (plan_view.AREA.left, plan_view.AREA.bottom)
    assert points[-1][0] == plan_view.AREA.right
    assert min(y for _, y in points) == plan_view.AREA.top
    assert 'aria-label="Learning rate: 0 in the first step, at most 0.5, ' in svg
    width = re.search(r'<rect[^>]* width="([\d.]+)"', svg)
    assert width is not None
    share = float(width[1]) / (plan_view.AREA.right - plan_view.AREA.left)
    assert share == pytest.approx(10 / 79, abs=1e-3)


def test_a_constant_rate_needs_no_curve_and_a_missing_pool_is_said() -> None:
    assert "<svg" not in plan_view.plan_html(plan())
    session.stop()  # one that other tests have left
    assert "No pool runs" in plan_view.plan_html(TrainingOptions().explain())
