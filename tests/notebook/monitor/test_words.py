"""What is told of trainings and sweeps, ordinary and odd ones, in every view; never a password."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from torch import nn

import gpupool
from gpupool.core.wire.events import (
    DataEvent,
    EndEvent,
    Event,
    RankEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from gpupool.notebook.monitor.picture import board_of, history_html, image_of, live_html
from gpupool.notebook.monitor.result_view import result_html, validation_html
from gpupool.notebook.monitor.views import TextProgress
from gpupool.notebook.monitor.words import training_text
from gpupool.notebook.page.markup import table_html
from gpupool.notebook.sweep import sweep_html
from gpupool.pool.notices import NoticeLines
from gpupool.training.history import TrainingHistory
from gpupool.training.result import TrainingResult
from gpupool.training.sweep import SweepProgress, Trial
from tests.notebook.feed import full_events, history_of
from tests.notebook.page.test_hostile_markup import HOSTILE, assert_harmless
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on

CANARY = "c4n4ry"
MARKUP = "</script><b>bold & 'quoted' \"metric\"</b>"
LONG = [f"{MARKUP} a_name_that_is_longer_than_any_plot_is_wide_{n}" for n in range(12)]


# ---- odd ones in every view --------------------------------------------------------------------

# name: the losses, the number of ranks, the names of metrics
COURSES: dict[str, tuple[list[float], int, list[str]]] = {
    "no step": ([], 2, []),
    "one step that is nan": ([math.nan], 2, []),
    "nan and huge": ([1.0, 0.5, 1e31, -1e308, math.nan, math.inf, 0.4], 2, []),
    "many metrics": ([1.0, 0.5], 2, LONG),
    "64 ranks": ([1.0, 0.5], 64, []),
    "unknown length": ([1.0, 0.5], 1, []),
}


def course(name: str) -> TrainingHistory:
    """A step and a validation for each loss, and a report of each rank."""
    losses, num_ranks, names = COURSES[name]
    metrics, ranks = dict.fromkeys(names, 0.5), tuple(range(num_ranks))
    is_known = name != "unknown length"
    events: list[Event] = [
        StartEvent(
            2, 4 * is_known, 32 * is_known, 8, num_ranks, "CPU", "gloo", ranks=ranks,
            devices=(MARKUP,) * num_ranks, validate_every=1, metrics=tuple(names),
            started_at=1.8e9, objective="loss",
        ),
        WarningEvent(MARKUP, 0),
        DataEvent(0, 1, 1, MARKUP, 1, {MARKUP: MARKUP}, MARKUP),
    ]  # fmt: skip
    for step, loss in enumerate(losses, start=1):
        events.append(StepEvent(step, 1, loss, 0.5, 0.1, 8, 0.1 * step))
        events.append(ValidationEvent(step, 1, loss, 0.5, 8, 0.1 * step, metrics, step == 1))
        events += [RankEvent(rank, step, 0.05, 0.1, 0.5) for rank in ranks]
    events.append(EndEvent("user", len(losses), 0.1 * len(losses)))
    return history_of(events, objective=repr(MARKUP))


def views(history: TrainingHistory) -> dict[str, str]:
    model = type(f"Net{MARKUP}", (nn.Linear,), {})(2, 2)
    result = TrainingResult(model, history, gpupool.TrainingOptions())
    compared, board = gpupool.compare(history, history), board_of(history)
    found = {
        "still": history_html(history),
        "text": training_text(history),
        "line": repr(history),
        "state": json.dumps(board.plots, allow_nan=False),
        "live": live_html(board, image_of(board), lambda _name, inner, _looks: inner),
        "result": result_html(result),
        "result as text": f"{result}\n{result.best!r}\n{result.warnings}",
        "compared": table_html(compared),
        "compared as text": repr(compared),
    }
    if history.best is not None:
        found["best"] = validation_html(history.best)
    return found


@pytest.mark.parametrize("name", COURSES)
def test_every_view_shows_it(name: str) -> None:
    history = course(name)
    for view, shown in views(history).items():
        assert shown, view
        if view in ("result", "compared", "best", "live"):
            assert "<b>bold" not in shown, view
            shown = re.sub(r"<style.*?</style>", "", shown, flags=re.DOTALL)
            ElementTree.fromstring(f"<div>{shown}</div>")
        if view == "still":
            assert shown.count("</script>") == shown.count("<script")
            assert "<b>bold" not in re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)
    pytest.importorskip("pandas")
    assert len(history.to_frame()) == len(COURSES[name][0])


@pytest.mark.long
@pytest.mark.parametrize("end", ["me:{}@host/run", "host/run?X-Amz-Signature={}%2Fx&v=1"])
def test_no_view_shows_a_password_of_an_options_url(pools: Pools, end: str) -> None:
    training, url = (network(), samples(16)), f"memory://{end.format(CANARY)}"
    result = train_on(pools[1], *training, batch_size=8, epochs=1, checkpoint=url)
    other = train_on(pools[1], *training, batch_size=8, epochs=1)
    shown, compared = views(result.history), gpupool.compare(result, other)
    assert "***" in shown["still"] + shown["result"]
    assert CANARY not in str(shown) + repr(result.options) + str(result.checkpoint)
    assert compared.columns[:2] == ("", "checkpoint")
    table = f"{compared!r}{table_html(compared)}"
    assert "***" in table
    assert CANARY not in table + result.history.to_frame().to_csv()


# ---- lines of a log, and notices ----------------------------------------------------------------


def test_a_log_has_a_line_per_epoch_validation_and_end() -> None:
    stream, history = io.StringIO(), TrainingHistory()
    progress = TextProgress(stream)
    for event in full_events(num_epochs=2, steps_per_epoch=3):
        # not known before, so that each epoch has a line as well
        history.add(replace(event, validate_every=0) if isinstance(event, StartEvent) else event)
        progress(history)
    progress(history)  # the end twice, as a run does
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["training", "epoch 1/2", "step 3/6"],
        ["training", "epoch 1/2", "step 3/6"],
        ["training", "epoch 2/2", "step 6/6"],
        ["training", "epoch 2/2", "step 6/6"],
        ["finished", "epoch 2/2", "step 6/6"],
    ]
    assert ["  val " in line for line in lines] == [False, True, True, True, True]
    assert "\r" not in stream.getvalue()


def test_each_notice_is_told_once_until_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    tell = NoticeLines("cell In[3] (--nowait)")
    for text in ("it lasts 31 s", "it lasts 46 s", "another", None, "it lasts 1 min 2 s"):
        tell(text)
    assert capsys.readouterr().err.splitlines() == [
        "gpupool: cell In[3] (--nowait): it lasts 31 s",
        "gpupool: cell In[3] (--nowait): another",
        "gpupool: cell In[3] (--nowait): it lasts 1 min 2 s",
    ]


def test_a_training_shows_its_notice_until_it_is_over() -> None:
    history = course("64 ranks")
    assert "hangs" not in history_html(history) + training_text(history)
    history.notice = "rank 1 <hangs>."
    assert "rank 1 &lt;hangs&gt;." in history_html(history)
    assert training_text(history).splitlines()[1] == "  rank 1 <hangs>."


# ---- a sweep ------------------------------------------------------------------------------------

REPORTS = [(1, 0.4), (2, float("nan")), (3, 0.9)]
DONE = Trial(0, {"lr": 0.0125, "layers": 64}, "done", 0.9, REPORTS, 1, 12.0)
FAILED = Trial(2, {"lr": 0.5}, "failed", None, [], 1, 0.5, "ValueError: no <b>")
RUNNING = Trial(3, {"lr": 0.2})
TRIALS = [DONE, Trial(1, {"lr": 1e-5}, "pruned", 0.1, [(1, 0.1)], 0, 2.0), FAILED, RUNNING]
SWEEP = SweepProgress("digits", "accuracy", "maximize", TRIALS, 40, 14.0, 120.0)


def test_each_trial_has_a_row_and_the_best_is_named() -> None:
    html = sweep_html(SWEEP)
    found = dict(re.findall(r"<tr><td [^>]*>(\d+)</td>(.*?)</tr>", html))
    assert [n for n, row in found.items() if ">best<" in row] == ["0"]
    assert all(f">{trial.state}<" in found[str(trial.number)] for trial in TRIALS)
    for shown in (">0.0125<", ">64<", ">90.0 %<", 'alt="2 reports, the last 90.0 %"'):
        assert shown in found["0"]
    assert "Best: trial 0: accuracy 90.0 % with lr 0.0125, layers 64" in html
    assert "digits: 3 of 40 trials, about 2 min 0 s left" in html
    assert '<progress value="0.075" aria-label="Trials"' in html
    assert "<progress" not in sweep_html(replace(SWEEP, status="finished"))


def test_odd_names_values_and_courses() -> None:
    odd = replace(DONE, number=1, params={HOSTILE: HOSTILE}, course=[(5, 1e308), (5, 1e308)])
    trials = [DONE, odd, replace(odd, state="failed", error=HOSTILE)]
    assert_harmless(sweep_html(replace(SWEEP, name=HOSTILE, metric=HOSTILE, trials=trials)))
    assert "<table" not in sweep_html(replace(SWEEP, trials=[], left_s=None))
