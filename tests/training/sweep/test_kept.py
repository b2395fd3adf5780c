"""Sweeps that go on: after a notebook was killed, or a storage lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from gpupool import DataError, OptionsError, Pool
from gpupool.training.study import StoreJournal
from tests.servers.s3 import SeaweedServer
from tests.support.environment import environment
from tests.support.processes import notebook, until
from tests.training.sweep.sweeps import noted, noting, states, swept

SCRIPT = """
import sys, time
from pathlib import Path
from gpupool import Pool, PoolOptions
from tests.training.sweep.sweeps import noting, swept

objective = noting(Path(sys.argv[1]), lambda x: time.sleep(60 * (x > 4)))
swept(Pool(PoolOptions(n=2, device="cpu")), objective, {"x": range(8)}, storage=sys.argv[2])
"""


@pytest.mark.parametrize("kind", ["{}/sweep.log", "sqlite:///{}/sweep.db", "s3://sweeps{}"])
def test_the_same_name_goes_on_and_what_is_finished_counts(
    pool2: Pool, tmp_path: Path, s3: SeaweedServer, kind: str
) -> None:
    space, objective = {"x": range(10_000)}, noting(tmp_path)
    usual: dict[str, Any] = {"objective": objective, "space": space, "trials": 5}
    usual |= {"storage": kind.format(tmp_path), "name": "a", "sampler": "random"}
    if "s3:" in kind:
        s3.make_bucket("sweeps")
    with environment(s3.env):
        first = [one.params for one in swept(pool2, **{**usual, "trials": 3}).progress.trials]
        more = [one.params for one in swept(pool2, **usual).progress.trials]
        again = swept(pool2, **usual)
        assert [one.params for one in again.progress.trials] == more
        assert more[:3] == first
        assert sorted(params["x"] for params in more) == noted(tmp_path)
        assert len({*noted(tmp_path)}) == 5
        for other in ({"space": {"x": range(9)}}, {"metric": "loss"}, {"direction": "maximize"}):
            with pytest.raises(OptionsError, match="another"):
                swept(pool2, **{**usual, **other})
        assert len(swept(pool2, **{**usual, "name": "b"}).progress.trials) == 5


@pytest.mark.parametrize("kind", ["{}/sweep.log", "sqlite:///{}/sweep.db"])
def test_a_storage_that_is_lost_ends_the_sweep(pool2: Pool, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    noted_here = noting(tmp_path, lambda x: shutil.rmtree(folder))
    with pytest.raises(DataError, match=r"folder/sweep\."):
        swept(pool2, noted_here, {"x": range(99)}, storage=kind.format(folder), on="notebook")
    assert noted(tmp_path) == [0]


def test_a_store_has_one_writer_and_a_bucket(pool2: Pool, s3: SeaweedServer) -> None:
    with environment(s3.env):
        url = f"{s3.make_bucket('writers')}/sweep"
        other = StoreJournal(url)
        swept(pool2, lambda params: 1.0, {"x": [1]}, storage=url)
        with pytest.raises(DataError, match="another notebook"):
            other.append_logs([{}])
        with pytest.raises(DataError, match="no-such-bucket"):
            swept(pool2, print, {"x": [1]}, storage="s3://no-such-bucket/sweep")


def test_after_the_notebook_was_killed_the_rest_is_done(pool2: Pool, tmp_path: Path) -> None:
    storage = str(tmp_path / "sweep.log")
    process = notebook(SCRIPT, str(tmp_path), storage)
    until(lambda: noted(tmp_path) == [0, 1, 2, 3, 4], 60.0, "the first trials")
    time.sleep(random.Random(0).random())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    result = swept(pool2, noting(tmp_path), {"x": range(8)}, storage=storage)
    assert states(result) == 8 * ["done"]
    assert sorted(one.params["x"] for one in result.progress.trials) == [*range(8)]
    assert noted(tmp_path) == [*range(8)]


def test_what_has_failed_is_tried_again(pool2: Pool, tmp_path: Path) -> None:
    def fail(x: int) -> None:
        if x > 2:
            raise ValueError(x)

    storage, space = tmp_path / "sweep.log", {"x": range(6)}
    first = swept(pool2, noting(tmp_path, fail), space, storage=storage)
    assert sorted(states(first)) == 3 * ["done"] + 3 * ["failed"]
    assert states(swept(pool2, noting(tmp_path), space, storage=storage)) == 6 * ["done"]
    assert noted(tmp_path) == [*range(6)]


def test_optuna_says_what_a_trial_that_waits_is_to_try() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 1})
    assert study.trials[0].system_attrs["fixed_params"] == {"x": 1}
