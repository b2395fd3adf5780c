"""What is arranged for groups on NCCL, as far as a machine without a GPU can show it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from gpupool import Pool, SpmdError
from gpupool.core.errors import PoolError
from gpupool.core.wire.requests import SetEnvironment
from gpupool.engine.group import forming
from tests.engine.group.torch_ranks import run_ranks
from tests.support.raising import raises

SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"
NETWORK = "GLOO_SOCKET_IFNAME"


@pytest.fixture
def pool(pool2: Pool) -> Iterator[Pool]:
    """The shared pool, whose group is whole afterwards."""
    yield pool2
    assert dict(pool2.run(SUM)) == {0: 2.0, 1: 2.0}


def plan(folder: str, backend: str, device: str) -> forming.Plan:
    return forming.Plan(f"{folder}/store", backend, [0], backend, 0, 1, device)


def form_on_gpu_3(rank: int, folder: str) -> str:
    dist.destroy_process_group()
    try:
        forming.form_as_asked(plan(folder, "nccl", "cuda:3"), {})
    except ValueError as error:  # of torch, which knows of no GPU here
        return str(error)
    return ""


def test_a_group_on_nccl_is_bound_to_the_ranks_own_gpu(tmp_path: Path) -> None:
    (error,) = run_ranks(form_on_gpu_3, str(tmp_path), n=1)
    assert "device_id cuda:3 is out of range" in error


@pytest.mark.parametrize("ask", ["init_process_group('nccl')", "new_group([0, 1], backend='nccl')"])
def test_nccl_is_refused_on_all_ranks_if_one_has_no_gpu(pool: Pool, ask: str) -> None:
    shown = (f"{ask.partition('(')[0]}: 'nccl' needs a GPU for every rank", "0, 1 ")
    with raises(SpmdError, shown, ename="ValueError") as caught:
        pool.run(f"dist.{ask}")
    assert set(caught.value.errors) == {0, 1}


WORDS = (
    "ProcessGroupNCCL not initialized",
    "ProcessGroupNCCL has been finalized",
    "NCCL communicator was aborted on rank 0.",
    "NCCL communicator was aborted after a previous error",
)


def form_again_and_say(rank: int, folder: str) -> list[bool]:
    dist.destroy_process_group()
    forming.connect(plan(folder, "gloo", "cpu"))
    held = dist.group.WORLD
    gc.collect()
    forming.connect(forming.Plan(f"{folder}/next", "gloo", [0], "gloo", 0, 1, "cpu"))
    assert held is not dist.group.WORLD
    return [forming.is_of_earlier(words, []) for words in (*WORDS, "no tensor")]


def test_what_nccl_says_of_a_group_that_was_left_is_explained(tmp_path: Path) -> None:
    (found,) = run_ranks(form_again_and_say, str(tmp_path), n=1)
    assert found == [True] * len(WORDS) + [False]


def test_the_first_error_and_what_nccl_has_logged_of_it_are_shown(pool: Pool) -> None:
    warning = "host:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x"
    log = f"import os\nos.write(1, b'{warning}\\n'); os.environ['{NETWORK}'] = 'nosuch'"
    pool.run(f"{log}\ndist.destroy_process_group()")
    try:
        with raises(PoolError, "nosuch", f" NCCL wrote: {warning}."):
            pool.run(SUM)
    finally:
        for answer in pool.ask(SetEnvironment({NETWORK: "lo"}, [], False), [0, 1]).values():
            answer.result(30)
