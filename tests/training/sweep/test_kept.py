"""Sweeps that go on: after a notebook or a rank was killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpupool import DataError, OptionsError, Pool
from gpupool.training.sweep.journal import StoreJournal
from tests.servers.s3 import SeaweedServer
from tests.support.environment import environment
from tests.support.processes import engine_pid, notebook, until
from tests.training.sweep.sweeps import noted, noting, states, swept

SCRIPT = """
import sys, time
from pathlib import Path
from gpupool import Pool, PoolOptions
from tests.training.sweep.sweeps import noting, swept

folder, storage = Path(sys.argv[1]), sys.argv[2]
objective = noting(folder, lambda x: time.sleep(60 * (x > 4)))
swept(Pool(PoolOptions(n=2, device="cpu")), objective, {"x": list(range(8))}, storage=storage)
"""


def places(tmp_path: Path) -> dict[str, str]:
    return {"file": f"{tmp_path}/sweep.log", "database": f"sqlite:///{tmp_path}/sweep.db"}


@pytest.mark.parametrize("kind", ["file", "database"])
def test_the_same_name_goes_on_and_what_is_finished_counts(
    pool2: Pool, tmp_path: Path, kind: str
) -> None:
    storage, folder = places(tmp_path)[kind], tmp_path / "ran"
    folder.mkdir()
    given: dict[str, Any] = {"storage": storage, "name": "a", "sampler": "random"}
    space = {"x": range(10_000)}
    first = swept(pool2, noting(folder), space, trials=3, **given)
    more = swept(pool2, noting(folder), space, trials=5, **given)
    again = swept(pool2, noting(folder), space, trials=5, **given)
    ran = [trial.params["x"] for trial in more.progress.trials]
    assert ran[:3] == [trial.params["x"] for trial in first.progress.trials]
    assert len(set(ran)) == len(noted(folder)) == 5
    assert [trial.params for trial in again.progress.trials] == [{"x": x} for x in ran]
    for other in ({"space": {"x": range(9)}}, {"metric": "loss"}, {"direction": "maximize"}):
        with pytest.raises(OptionsError, match="another"):
            swept(pool2, **{"objective": print, "space": space, "trials": 5, **given, **other})
    assert swept(pool2, noting(folder), {"x": range(3)}, storage=storage, name="b").best is not None


def test_after_the_notebook_was_killed_the_rest_is_done(pool2: Pool, tmp_path: Path) -> None:
    storage, folder = places(tmp_path)["file"], tmp_path / "ran"
    folder.mkdir()
    process = notebook(SCRIPT, str(folder), storage)
    until(lambda: noted(folder) == [0, 1, 2, 3, 4], 60.0, "the first trials")
    time.sleep(random.Random(0).random())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    result = swept(pool2, noting(folder), {"x": list(range(8))}, storage=storage)
    assert states(result) == 8 * ["done"]
    assert sorted(trial.value or 0 for trial in result.progress.trials) == [*range(8)]
    assert noted(folder) == [*range(8)]


def test_what_was_stopped_or_has_failed_is_tried_again(pool2: Pool, tmp_path: Path) -> None:
    def fail(x: int) -> None:
        if x > 2:
            raise ValueError(x)

    storage, folder = places(tmp_path)["file"], tmp_path / "ran"
    folder.mkdir()
    first = swept(pool2, noting(folder, fail), {"x": list(range(6))}, storage=storage)
    assert sorted(states(first)) == 3 * ["done"] + 3 * ["failed"]
    result = swept(pool2, noting(folder), {"x": list(range(6))}, storage=storage)
    assert states(result) == 6 * ["done"]
    assert noted(folder) == [*range(6)]


def test_a_sweep_is_kept_in_a_store(pool2: Pool, s3: SeaweedServer, tmp_path: Path) -> None:
    url = f"{s3.make_bucket('sweeps')}/runs"
    with environment(s3.env):
        given: dict[str, Any] = {"storage": url, "sampler": "tpe", "name": "a"}
        first = swept(pool2, noting(tmp_path), {"x": range(10_000)}, trials=3, **given)
        other = StoreJournal(url)
        more = swept(pool2, noting(tmp_path), {"x": range(10_000)}, trials=5, **given)
        assert more.progress.trials[:3] != first.progress.trials[:3]  # whose ranks are known
        assert len(noted(tmp_path)) == 5
        assert len(more.study.trials) == 5
        with pytest.raises(DataError, match="another notebook"):
            other.append_logs([{}])
        with pytest.raises(DataError, match="no-such-bucket"):
            swept(pool2, print, {"x": [1]}, storage="s3://no-such-bucket/runs")


@pytest.mark.timeout(300)
def test_ranks_that_are_killed_cost_no_trial(pool2: Pool, tmp_path: Path) -> None:
    is_over, draw = threading.Event(), random.Random(7)

    def kill() -> None:
        for _ in range(10):
            is_over.wait(0.2 + draw.random())
            rank = draw.randrange(2)
            pool2.wait_until_usable()
            if not is_over.is_set():
                os.kill(engine_pid(pool2, rank), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = swept(pool2, noting(tmp_path, lambda x: time.sleep(0.4)), {"x": list(range(24))})
    is_over.set()
    killer.join()
    lost = [trial for trial in result.progress.trials if trial.state != "done"]
    assert all("EngineDiedError" in trial.error for trial in lost)  # twice
    assert [trial.params["x"] for trial in result.progress.trials] == [*range(24)]
    assert {*noted(tmp_path)} >= {*range(24)} - {trial.params["x"] for trial in lost}
    assert len(lost) <= 5
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}
