"""A sweep as a picture that stays, and as lines."""

from __future__ import annotations

import re
from dataclasses import replace

from gpupool.notebook.sweep import sweep_html
from gpupool.training.sweep import SweepProgress, Trial
from tests.notebook.page.test_hostile_markup import HOSTILE, assert_harmless

COURSE = [(1, 0.4), (2, float("nan")), (3, 0.9)]
DONE = Trial(0, {"lr": 0.0125, "layers": 64}, "done", 0.9, COURSE, 1, 12.0)
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
