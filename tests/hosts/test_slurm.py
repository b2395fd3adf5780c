"""A pool on the hosts of a Slurm job, or of Open MPI, with one home for all."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hosts.lab import NODES, Lab, need
from tests.hosts.notebook import SUM, Notebook
from tests.support.processes import until

pytestmark = pytest.mark.hosts
START = "start('slurm', n=4, words=('--ntasks-per-node=2', '-p', 'gpu', '--gres=gpu:2'))"
GONE_S = 3.0
SNIFF = """
import os, socket
heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
print("on", flush=True)
while True: os.write(1, heard.recv(1 << 16)[66:])  # what TCP carries
"""


@pytest.fixture
def notebook(cluster: Lab) -> Iterator[Notebook]:
    """One without a pool; after it there is no job and no process."""
    with closing(Notebook(cluster)) as notebook:
        yield notebook
    gone(cluster)
    assert "Traceback" not in cluster.log("login", "notebook").read_text()


def jobs(lab: Lab, what: str = "%T") -> list[str]:
    return sorted(lab.run("login", "squeue", "--noheader", f"--format={what}").split())


def gone(lab: Lab, *hosts: str) -> None:
    """Fail unless soon there is no job, and nothing is left on these hosts."""
    until(lambda: not jobs(lab), GONE_S, "the end of the job")
    lab.empty(*hosts)


def ranks_are_on_both(notebook: Notebook) -> None:
    assert notebook.spmd("import os; os.uname().nodename") == {r: NODES[r // 2] for r in range(4)}
    assert notebook.spmd(SUM) == dict.fromkeys(range(4), 4.0)


def test_a_job_has_the_ranks_whose_keys_do_not_cross_the_network_and_is_given_back(
    notebook: Notebook, cluster: Lab
) -> None:
    sniffer = cluster.popen("switch", sys.executable, "-c", SNIFF)
    heard = cluster.log("switch", sys.executable)
    until(lambda: heard.read_bytes().startswith(b"on\n"), 5.0)
    notebook.run(START)
    ranks_are_on_both(notebook)
    sniffer.kill()
    words = heard.read_bytes()
    assert b'"kind": "hello"' in words  # so lines can be read
    connection = json.loads(notebook.run("open(pool.connection_file).read()"))
    keys = [value.encode() for name, value in connection.items() if "key" in name]
    assert keys
    assert not [key for key in keys if key in words]
    assert jobs(cluster) == ["RUNNING"]
    agent = cluster.parent("node2", notebook.run("pool.status().pids[2]"))
    environ = cluster.path("node2", f"/proc/{agent}/environ").read_bytes()  # what Slurm has bound
    assert b"CUDA_VISIBLE_DEVICES=0,1" in environ.split(b"\0")
    notebook.run("pool.stop()")
    gone(cluster, *NODES)


@pytest.mark.parametrize("is_killed", [False, True])
def test_waiting_is_shown_and_an_end_cancels_the_job(
    notebook: Notebook, cluster: Lab, is_killed: bool
) -> None:
    cluster.popen("login", "salloc", "-K", "-N2", "--exclusive", "sleep", "300")
    until(lambda: jobs(cluster) == ["RUNNING"], 5.0)
    starting = notebook.begin(START)
    until(lambda: jobs(cluster) == ["PENDING", "RUNNING"], 5.0)
    job = cluster.run("login", "squeue", "-h", "-t", "PENDING", "-o", "%i").strip()
    said = cluster.log("login", "notebook")
    until(lambda: job in said.read_text(), 10.0, "its being shown")
    cluster.run("login", "kill", "-9" if is_killed else "-INT", notebook.pid)
    until(lambda: jobs(cluster) == ["RUNNING"], GONE_S, "its end")
    cluster.run("login", "scancel", "--user=root")
    assert is_killed or starting.result()["error"] == "KeyboardInterrupt"


def test_a_rejection_is_in_the_words_of_the_scheduler(notebook: Notebook, cluster: Lab) -> None:
    answer = notebook.begin("start('slurm', n=4, words=('-p', 'nope'))").result()
    assert answer["error"] == "PoolStartError"
    assert "invalid partition specified: nope" in answer["text"]


@pytest.mark.parametrize("word", ["CANCELLED", "TIMEOUT"])
def test_the_end_of_the_job_ends_the_pool_with_that_word(
    notebook: Notebook, cluster: Lab, word: str
) -> None:
    notebook.run("start('slurm', n=2, words=('-N2', '-t', '1'))")
    running = notebook.begin("errors('if rank == 0: dist.all_reduce(torch.ones(1))')")
    (job,) = jobs(cluster, "%i")
    if word == "CANCELLED":
        cluster.run("login", "scancel", job)
    else:  # the limit of a minute is announced
        said = cluster.log("login", "notebook")
        until(lambda: f"job {job} ends at " in said.read_text(), 10.0)
    assert 0 in ast.literal_eval(running.result()["value"])
    until(lambda: notebook.run("pool.status().state") == "broken", 5.0)
    reason = notebook.run("pool.status().reason")
    assert word in reason
    assert job in reason


@pytest.mark.parametrize(
    "start", [START, "start('mpi', hosts=('node1:2', 'node2:2'))"], ids=["slurm", "mpi"]
)
def test_a_notebook_that_is_killed_leaves_nothing(
    notebook: Notebook, cluster: Lab, start: str
) -> None:
    need("mpiexec")
    notebook.run(start)
    ranks_are_on_both(notebook)
    cluster.run("login", "kill", "-9", notebook.pid)
    gone(cluster)


def test_in_a_job_of_one_s_own_no_other_is_asked_for(cluster: Lab) -> None:
    with closing(Notebook(cluster, "salloc", "-N2")) as notebook:
        notebook.run("start('slurm', n=4)")
        ranks_are_on_both(notebook)
        assert jobs(cluster) == ["RUNNING"]
        notebook.run("pool.stop()")
        cluster.empty(*NODES)
        assert jobs(cluster) == ["RUNNING"]
    gone(cluster)
