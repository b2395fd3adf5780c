"""What holds after every fault, checked in one place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

import psutil

from gpupool import Pool, SpmdError
from gpupool.pool.calls.execution import Execution
from tests.support.processes import (
    engine_pid,
    family,
    files_in,
    folder_of,
    gone,
    reach,
    reached,
    until,
)

DEADLINE_S = 30.0  # far from what is promised, also on a machine that others use
CANARY = "c4n4ry-value-of-a-secret"
SECRET = "FAULTS_TEST_TOKEN"
SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
KEPT = "globals().get('kept')"
# The frames of the last error are kept for the debugger, and a DataLoader in them with its workers;
# a group of the user's own is kept by torch.
TIDY_UP = """
import contextlib
with contextlib.suppress(Exception): dist.destroy_process_group(globals().pop("sub"))
raise RuntimeError("the last one now")
"""
Footprint = tuple[int, int]  # what a process holds: descriptors, threads
MAX_MORE = (12, 8)  # may be gained once, by the first use of something: autograd's threads, say


def footprint(pid: int) -> Footprint:
    process = psutil.Process(pid)
    return process.num_fds(), process.num_threads()


def is_flat(pid: int, first: Footprint) -> bool:
    """Whether a process has not gained more than what is gained once."""
    more = zip(footprint(pid), first, MAX_MORE, strict=True) if not gone(pid) else ()
    return all(now - then <= most for now, then, most in more)


@dataclass
class Faulty:
    """A pool to which something is done; `check` tells whether it is as it should be afterwards.

    `notices` is what was said while cells ran.
    """

    pool: Pool
    before: dict[int, Footprint]
    folder: Path  # for files of the test
    pids: dict[int, int] = field(default_factory=dict)
    generation: int = 0
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pids, self.generation = dict(self.pool.status().pids), self.pool.generation

    def begin(self, source: str, timeout_s: float | None = None) -> Execution:
        return self.pool.begin(
            source,
            ranks=range(self.pool.world_size),
            on_output=lambda *_: None,
            on_notice=lambda text: self.notices.append(text) if text else None,
            timeout_s=timeout_s,
        )

    def begun(self, source: str, after_s: float = 0.1) -> Execution:
        path = self.folder / uuid4().hex
        execution = self.begin(f"{reach(path)}\n{source}")
        until(lambda: reached(path, *range(self.pool.world_size)), DEADLINE_S, "its beginning")
        time.sleep(after_s)
        return execution

    def fails(self, source: str, timeout_s: float | None = None) -> SpmdError:
        return self.ended(self.begin(source, timeout_s))

    def ended(self, execution: Execution) -> SpmdError:
        assert execution.wait(DEADLINE_S), f"no end within {DEADLINE_S:g} s"
        error = execution.error()
        assert error is not None, "no error"
        return error

    def stopped(self, source: str, after_s: float = 0.1) -> SpmdError:
        execution = self.begun(source, after_s)
        execution.interrupt()
        return self.ended(execution)

    def pid(self, rank: int) -> int:
        return engine_pid(self.pool, rank)

    def check(self, lost: Iterable[int] = ()) -> None:
        """Fails unless all is well, and only the ranks in `lost` have a new process."""
        lost, ranks = set(lost), range(self.pool.world_size)
        pool = self.pool
        sums = pool.run(SUM, timeout_s=DEADLINE_S)
        assert dict(sums) == dict.fromkeys(ranks, float(len(ranks)))
        kept = pool.run(KEPT, timeout_s=DEADLINE_S)
        assert dict(kept) == {rank: None if rank in lost else 10 + rank for rank in ranks}
        assert {rank for rank in ranks if self.pid(rank) != self.pids[rank]} == lost
        assert gone(*(self.pids[rank] for rank in lost))
        assert pool.generation >= self.generation + bool(lost)
        with contextlib.suppress(SpmdError):
            pool.run(TIDY_UP, timeout_s=DEADLINE_S)
        pool.run("import gc; gc.collect()", timeout_s=DEADLINE_S)
        names = {"starter", "controller", *(f"rank {rank}" for rank in ranks)}

        def running() -> set[str]:
            """A DataLoader of an older torch ends its workers and does not reap them."""
            return {name for name, process in family(pool).items() if not gone(process.pid)}

        until(lambda: running() == names, 10.0, "the end of all other processes")
        for path, content in files_in(folder_of(pool).parent):
            assert CANARY.encode() not in content, path
        for pid, first in self.before.items():
            until(partial(is_flat, pid, first), 5.0, f"{pid} as flat as {first}")
