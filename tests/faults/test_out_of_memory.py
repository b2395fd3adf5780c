"""The kernel ends a rank because memory has run out: a real control group with a real limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cgroups import memory_cgroup
from tests.support.processes import notebook

pytestmark = pytest.mark.long

SCRIPT = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")  # and so all that this starts
import gpupool
with gpupool.start(n=2, device="cpu") as pool:
    pool.run("kept = rank")
    try:
        pool.run("if rank == 1: large = [torch.ones(2**26) for _ in range(20)]\\ndist.barrier()")
    except gpupool.SpmdError as error:
        print(error.first.rank, error.first.evalue.partition("\\n")[0], flush=True)
    print(dict(pool.run("globals().get('kept')")), flush=True)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with memory_cgroup(1536 << 20) as folder:
        yield folder


def test_a_rank_that_the_kernel_has_ended_says_so_and_the_other_keeps_its_variables(
    cgroup: Path,
) -> None:
    with notebook(SCRIPT, str(cgroup)) as process:
        said, _ = process.communicate(timeout=120)
    assert said.splitlines() == [
        "1 rank 1 was killed by SIGKILL (out of host memory: the memory limit of its cgroup "
        "(1.5 GiB) was reached); its variables are lost. It is being replaced; the other ranks "
        "keep theirs.",
        "{0: 0, 1: None}",
    ]
