"""How an inline pool comes and goes: this process is afterwards what it was before."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import IPython
import pytest
import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

import gpupool
from gpupool import InlinePool, NoPoolError, OptionsError, PoolError, PoolOptions, PoolStartError
from gpupool.core.machine.gpus import visible_gpus
from gpupool.pool import session
from tests.support.processes import folder_of, open_files
from tests.support.raising import raises

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
Script = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where a pool of this test makes its folder; no pool runs before the test nor after it."""
    session.stop()
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    yield tmp_path
    session.stop()
    tempfile.tempdir = before


def this_process() -> dict[str, Any]:
    """What an inline pool could have changed."""
    return {
        # torch notes a folder there, when its compiler is first loaded
        "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "streams": [vars(s).get("write") for s in (sys.stdout, sys.stderr)],
        "hooks": [sys.displayhook, sys.excepthook, sys.breakpointhook],
        "main": sys.modules["__main__"],
        "path": list(sys.path),
        "cwd": os.getcwd(),
        "shell": get_ipython(),
        "group": dist.is_initialized(),
        "prompt": hasattr(sys, "ps1"),
    }


def test_it_is_the_pool_of_this_notebook_until_it_stops(scratch: Path) -> None:
    before = this_process()
    pool = gpupool.start(inline=True, device="cpu")
    assert isinstance(pool, InlinePool)
    assert gpupool.current_pool() is pool
    assert dict(pool.run(SUM)) == {0: 1.0}
    with raises(PoolError, "running"):
        gpupool.start(inline=True)
    assert os.environ["WORLD_SIZE"] == "1"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"  # it would end this process
    assert this_process()["main"] is before["main"]
    folder = folder_of(pool)
    pool.stop()
    pool.stop()
    assert this_process() == before
    assert not folder.exists()
    assert list(scratch.glob("gpupool*")) == []  # torch may have put something there
    assert pool.status().state == "stopped"
    with raises(PoolError, "stopped"):
        pool.run("1")
    with pytest.raises(NoPoolError):
        gpupool.current_pool()


def test_functions_and_training_need_no_shell() -> None:
    with gpupool.start(inline=True, device="cpu") as pool:
        shell = get_ipython()
        assert pool.run(lambda: dist.get_world_size())[0] == 1
        assert get_ipython() is shell


def test_what_the_user_changes_meanwhile_stays() -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "7", "8"
    with gpupool.start(inline=True, device="cpu"):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        os.environ["WORLD_SIZE"] = "9"
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("7", "9")


def test_a_process_group_of_the_users_own_is_left_alone(scratch: Path, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "mine"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before, mine = this_process(), dist.group.WORLD
        with raises(PoolStartError, "group", shown="destroy_process_group()"):
            gpupool.start(inline=True, device="cpu")
        assert this_process() == before
        assert dist.group.WORLD is mine
        assert session.find() is None
    finally:
        dist.destroy_process_group()


def test_a_group_that_the_user_has_put_in_its_place_stays(tmp_path: Path) -> None:
    with gpupool.start(inline=True, device="cpu") as pool:
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "mine"), 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        pool.reform_group()
        assert pool.status().state == "broken"
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "kind", "names"),
    [
        ({"n": 2}, "range", {"n"}),
        ({"gpus": "0,1"}, "range", {"gpus"}),
        ({"idle_timeout": "2h"}, "no effect", {"idle_timeout"}),
        ({"timeout_s": 5.0}, "no effect", {"timeout_s"}),
        ({"on_hang": "abort"}, "no effect", {"on_hang"}),
        ({"hang_after_s": 5.0}, "no effect", {"hang_after_s"}),
        ({"backend": "nccl", "device": "cpu"}, "conflict", {"backend", "device"}),
        ({"env": ["NOSUCH_VARIABLE"], "device": "cpu"}, "not set", {"NOSUCH_VARIABLE"}),
    ],
)
def test_options_that_contradict_it_are_refused(
    scratch: Path, options: dict[str, Any], kind: str, names: set[str]
) -> None:
    before = this_process()
    with raises(OptionsError, kind, *names):
        gpupool.start(inline=True, **options)
    assert this_process() == before
    assert list(scratch.glob("gpupool*")) == []  # torch may have put something there


def test_options_that_mean_the_same_are_taken() -> None:
    with gpupool.start(inline=True, n=1, device="cpu", idle_timeout="never") as pool:
        assert pool.world_size == 1


def test_pools_in_a_row_leave_nothing_behind() -> None:
    def alive() -> dict[str, set[Any]]:
        gc.collect()
        things = gc.get_objects()
        return {
            "descriptors": set(open_files().items()),
            "threads": set(threading.enumerate()),
            "pools": {id(thing) for thing in things if issubclass(type(thing), InlinePool)},
            "shells": {id(thing) for thing in things if issubclass(type(thing), InteractiveShell)},
        }

    def use(times: int) -> None:
        for _ in range(times):
            with gpupool.start(inline=True, device="cpu") as pool:
                pool.run("x = torch.ones(3)\nx.sum().item()")

    use(2)  # what the first ones load stays loaded
    session._current = None
    before = alive()
    use(5)
    session._current = None
    after = alive()
    if IPython.version_info[:2] == (9, 0):  # it keeps every shell by a reference of its own
        before.pop("shells"), after.pop("shells")
    # what earlier tests have left may go meanwhile
    assert [kind for kind in before if after[kind] - before[kind]] == []


# In one process, as each has to load torch: many pools, a post-mortem, a breakpoint, one pool left.
SCRIPT = """
import gc, os, pdb, types
import gpupool

def fails(row):
    bad = row * 2
    raise ValueError(bad)

def work(row):
    half = row / 2
    breakpoint()
    return half

for _ in range(5):
    with gpupool.start(inline=True, device="cpu") as pool:
        pool.run("1")
del pool
gpupool.pool.session._current = None
gc.collect()
# atexit counts places, also empty ones: see who is asked
left = [f for f in gc.get_objects() if type(f) is types.FunctionType
        and f.__qualname__ == "_stop_at_exit.<locals>.stop"]
print("callbacks", len(left))
with gpupool.start(inline=True, device="cpu") as pool:
    try:
        pool.run(fails, 6)
    except gpupool.SpmdError as error:
        pdb.post_mortem(error.__traceback__)
    print("value", pool.run(work, 6)[0])
pool = gpupool.start(inline=True, device="cpu")
print(pool.run("rank + 41")[0], os.listdir(os.environ["TMPDIR"]))
"""
ANSWERS = "p bad\nq\np half\np row\nc\n"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """What `SCRIPT` has said, and where its temporary files were."""
    folder = tmp_path_factory.mktemp("script")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        input=ANSWERS,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, folder


def test_a_post_mortem_in_a_plain_script_stops_in_the_users_frame(script: Script) -> None:
    assert "(Pdb) 12\n" in script[0].stdout


def test_a_breakpoint_in_a_plain_script_asks_the_terminal(script: Script) -> None:
    assert "(Pdb) 3.0\n(Pdb) 6\n(Pdb) value 3.0" in script[0].stdout


def test_the_callbacks_for_the_end_are_taken_back(script: Script) -> None:
    assert script[0].stdout.startswith("callbacks 0\n")


def test_a_script_that_ends_without_stopping_leaves_no_folder(script: Script) -> None:
    done, folder = script
    assert re.search(r"\n41 \[.*'gpupool-inline-", done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.glob("gpupool*")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="this machine has no NVIDIA GPU")
def test_a_gpu_is_used_from_here() -> None:
    with InlinePool(PoolOptions(gpus=("0",))) as pool:
        assert pool.backend == "nccl"
        assert str(pool.run("device")[0]) == pool.ranks[0].device
        assert pool.run("x = torch.ones(1, device=device); dist.all_reduce(x); x.item()")[0] == 1
        assert pool.run("dist.all_reduce(torch.ones(1)); x.device.index")[0] is not None
        assert pool.ranks[0].gpu is not None
