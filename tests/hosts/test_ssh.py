"""A pool on two hosts that ssh reaches."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.hosts.lab import ADDRESSES, HOME, NODES, Lab
from tests.hosts.notebook import SUM, Notebook
from tests.support.processes import until

SECRET = "c4n4ry-value-of-a-secret"
START = "start('ssh', hosts=('node1', 'node2:2'), env=('LAB_*',))"
HOST_OF = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}
LOST_S = 10.0  # as promised
SIZE = 200_000_000
MARK = HOME / "waits"
HANG = f"""
import os, time
open({str(MARK)!r}, "w").close()
dist.all_reduce(torch.ones(1)) if rank < 2 else time.sleep(600)
"""


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    """One with a pool, which all tests of this file have in turn."""
    with closing(Notebook(lab, LAB_PLAIN="plain", LAB_TOKEN=SECRET)) as notebook:
        notebook.run(START)
        yield notebook


@pytest.fixture
def kept(notebook: Notebook) -> Callable[..., None]:
    """Says that all is well, and only these ranks have lost their variables, now set."""
    notebook.spmd("kept = 10 + rank")

    def check(*lost: int) -> None:
        assert notebook.spmd(SUM) == dict.fromkeys(HOST_OF, 4.0)
        expected = {rank: None if rank in lost else 10 + rank for rank in HOST_OF}
        assert notebook.spmd("globals().get('kept')") == expected
        assert notebook.spmd("import os; os.uname().nodename") == HOST_OF

    return check


def pids(notebook: Notebook, *ranks: int) -> list[int]:
    """The processes of ranks, as their host counts; 0 where there is none."""
    return list(notebook.run(f"[pool.status().pids.get(rank, 0) for rank in {ranks}]"))


def hanging(notebook: Notebook, lab: Lab) -> Callable[[], dict[int, tuple[bool, str]]]:
    """Begin a cell, and wait until node1's ranks wait for node2's in it; what its errors are."""
    for host in NODES:
        lab.path(host, MARK).unlink(missing_ok=True)
    running = notebook.begin(f"errors({HANG!r})")
    until(lambda: all(lab.path(host, MARK).exists() for host in NODES), 10.0)
    time.sleep(0.5)  # as far as the collective
    return lambda: dict(ast.literal_eval(running.result()["value"]))


def test_ranks_are_counted_host_by_host_and_compute_together(notebook: Notebook, lab: Lab) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    values = f"import os; [int(os.environ[name]) for name in {names}]"
    assert notebook.spmd(values) == {rank: [rank, rank % 2, 2, rank // 2, 2] for rank in HOST_OF}
    fields = "[(r.host, r.address, r.node_rank, r.local_rank, r.num_nodes) for r in pool.ranks]"
    places = [(host, ADDRESSES[host], rank // 2, rank % 2, 2) for rank, host in HOST_OF.items()]
    assert notebook.run(fields) == places
    assert notebook.spmd("os.uname().nodename") == HOST_OF
    assert notebook.spmd(SUM) == dict.fromkeys(HOST_OF, 4.0)
    for host, address in ADDRESSES.items():
        listening = lab.run(host, "ss", "-Hltn").splitlines()
        ends = [line.split()[3].rpartition(":") for line in listening]
        assert {at for at, _, port in ends if port != "22"} <= {"127.0.0.1", address}, listening


def test_output_and_errors_have_their_rank_and_host(notebook: Notebook) -> None:
    assert notebook.run("pool.run('print(os.uname().nodename)').text(2)") == "node2\n"
    error = notebook.begin("pool.run('if rank == 3: 1 / 0')").result()
    assert error["error"] == "SpmdError"
    assert all(part in error["text"] for part in ("rank 3", "node2", "ZeroDivisionError"))


@pytest.mark.hosts
def test_big_values_cross_once_for_each_host(notebook: Notebook, lab: Lab) -> None:
    notebook.run(f"import numpy; big = numpy.arange({SIZE // 8})")
    before = {host: lab.num_bytes(host) for host in NODES}
    notebook.run("pool['big'] = big")
    assert set(notebook.spmd("int(big.sum())").values()) == {sum(range(SIZE // 8))}
    for host in NODES:
        assert SIZE < lab.num_bytes(host)[0] - before[host][0] < 1.25 * SIZE
    before = {host: lab.num_bytes(host) for host in NODES}
    notebook.spmd("big = big + rank")
    assert notebook.run("int((pool['big'][2] - big).sum())") == 2 * SIZE // 8
    assert SIZE < lab.num_bytes("node2")[1] - before["node2"][1] < 1.25 * SIZE
    assert lab.num_bytes("node1")[1] - before["node1"][1] < 0.25 * SIZE


@pytest.mark.hosts
def test_stop_frees_ranks_that_wait_for_another_host(
    notebook: Notebook, lab: Lab, kept: Callable[..., None]
) -> None:
    ended = hanging(notebook, lab)
    lab.run("login", "kill", "-INT", notebook.pid)
    assert ended().keys() == set(HOST_OF)
    kept()


@pytest.mark.hosts
@pytest.mark.parametrize("lost", [(3,), (2, 3)], ids=["a rank", "the agent"])
def test_what_is_killed_comes_again_where_it_was(
    notebook: Notebook, lab: Lab, kept: Callable[..., None], lost: tuple[int, ...]
) -> None:
    before = pids(notebook, *lost)
    ended = hanging(notebook, lab)
    killed = before[0] if len(lost) == 1 else lab.parent("node2", before[0])
    lab.run("node2", "kill", "-9", str(killed))
    errors = ended()
    assert [errors[rank][0] for rank in (0, 1)] == [True, True]
    assert all("node2" in errors[rank][1] for rank in lost)
    until(lambda: all(pid not in (0, *before) for pid in pids(notebook, *lost)), 10.0)
    kept(*lost)
    assert not set(before) & lab.processes("node2").keys()


@pytest.mark.parametrize("is_healed", [True, pytest.param(False, marks=pytest.mark.hosts)])
def test_a_host_that_is_cut_off_is_named_and_comes_again(
    notebook: Notebook, lab: Lab, kept: Callable[..., None], is_healed: bool
) -> None:
    before = pids(notebook, 2, 3)
    all_there = {lab.parent("node2", before[0]), *before}
    ended, began = hanging(notebook, lab), time.time()
    lab.cable("node2", "down")
    errors, took_s = ended(), time.time() - began
    if is_healed:
        lab.cable("node2", "up")
        until(lambda: all(pid not in (0, *before) for pid in pids(notebook, 2, 3)), 60.0)
    else:  # its agent ends all, and the pool does not wait for ever
        until(lambda: not all_there & lab.processes("node2").keys(), 40.0)
        until(lambda: notebook.run("pool.status().state") == "broken", 60.0)
        assert "node2" in notebook.run("pool.status().reason")
        lab.cable("node2", "up")
        notebook.run("pool.restart()")
        notebook.spmd("kept = 10 + rank if rank < 2 else None")
    assert LOST_S / 2 < took_s < 2 * LOST_S
    assert [errors[rank][0] for rank in (0, 1)] == [True, True]
    assert all("node2" in errors[rank][1] for rank in (2, 3))
    kept(2, 3)
    until(lambda: not all_there & lab.processes("node2").keys(), 40.0)


TRAIN = """
import torch
from tests.support.trainings import network, samples, weights
inputs = network(torch.float64), samples(64, torch.float64), "cross_entropy"
weights(gpupool.train(*inputs, epochs=2, batch_size=16).model).tolist()
"""


@pytest.mark.hosts
def test_training_gives_what_it_gives_on_one_host(notebook: Notebook, lab: Lab) -> None:
    with closing(Notebook(lab)) as alone:
        alone.run("start(n=4)")
        assert notebook.run(TRAIN) == pytest.approx(alone.run(TRAIN), rel=1e-12)


@pytest.mark.hosts
def test_variables_reach_all_ranks_and_secrets_no_file_and_no_command(
    notebook: Notebook, lab: Lab
) -> None:
    values = notebook.spmd("import os; (os.environ['LAB_PLAIN'], os.environ['LAB_TOKEN'])")
    assert values == dict.fromkeys(HOST_OF, ("plain", SECRET))
    for host in ADDRESSES:
        files = ["/tmp", "/run", "/dev/shm", str(HOME), "-xdev", "-type", "f"]
        grep = ["-exec", "grep", "-l", SECRET, "{}", "+"]
        assert lab.run(host, "find", *files, *grep, check=False) == ""
        assert SECRET not in str(lab.processes(host))


def test_nothing_is_left_anywhere_when_the_notebook_is_killed(notebook: Notebook, lab: Lab) -> None:
    hanging(notebook, lab)
    assert lab.left().keys() == set(ADDRESSES)
    lab.run("login", "kill", "-9", notebook.pid)
    lab.empty()
