"""What `TrainingResult` says of itself, as text and as HTML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import CheckpointEvent, EndEvent, WarningEvent
from gpupool.notebook import formatters
from gpupool.notebook.monitor.result_view import result_html
from gpupool.training.history import TrainingHistory
from gpupool.training.result import TrainingResult
from tests.notebook.feed import full_events


def result_of(**training: int) -> TrainingResult:
    history = TrainingHistory()
    for event in full_events(**training):
        if isinstance(event, EndEvent):
            event = replace(event, kept_step=600)
        history.add(event)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    return TrainingResult(model, history, TrainingOptions())


def test_the_text_has_all_in_a_few_lines() -> None:
    result = result_of()
    result.history.add(CheckpointEvent(900, 6, "s3://a/step-00000900.pt", 9, 0.0, 0.0))
    result.history.add(WarningEvent("spike", "the loss jumped", 5))
    text = re.sub(r"started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "started then", repr(result))
    assert text.splitlines() == [
        "TrainingResult: finished, all 6 epochs completed, in 14 s",
        "  model       Sequential, 195 parameters, 51 of them trained",
        "  weights     the best ones, after step 600",
        "  data        76,800 images, 6 epochs planned",
        "  steps       900, batch 512 = 4 × 128",
        "  hardware    4 × H200, one host, NCCL, DDP, bf16",
        "  time        14 s, 40,960 images/s, started then",
        "  checkpoint  s3://a/step-00000900.pt",
        "                         loss    accuracy",
        "  training               0.2579  94.6 %",
        "  validation             0.4779  89.8 %",
        "  best (after step 600)  0.2722  88.4 %",
        "  warning: the loss jumped",
    ]


def test_the_html_has_the_same() -> None:
    result = result_of()
    result.history.add(WarningEvent("spike", "the loss <jumped>", 5))
    html = result_html(result)
    page = re.sub(r"\s+", " ", " ".join(ET.fromstring(html).itertext()))
    for part in (
        "Training result finished all 6 epochs completed, in 14 s",
        "the loss <jumped>",
        "Weights the best ones, after step 600",
        "Loss Accuracy Training 0.2579 94.6 %",
    ):
        assert part in page
    assert len(html) < 20_000


def test_ipython_shows_it_by_both() -> None:
    shell = InteractiveShell()
    formatters.register(shell)
    result = result_of(num_steps=10)
    bundle, _ = shell.display_formatter.format(result)  # type: ignore[union-attr]
    assert bundle["text/html"] == result_html(result)
    assert bundle["text/plain"] == repr(result)
