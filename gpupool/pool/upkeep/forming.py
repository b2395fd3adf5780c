"""The process group of all ranks, one generation after the other. Runs on the client.

Two phases: all ranks join, and only then connect, so that a fast rank cannot break the group
of a slow one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any

from gpupool.core.errors import EngineDiedError, GroupError, PoolError, UnansweredError
from gpupool.core.machine.gpu_setup import little_shared_memory
from gpupool.core.wire.calls import FormGroup, GroupPlan, JoinGroup
from gpupool.core.wire.requests import Abort, Counts
from gpupool.pool.engines.engines import Engines
from gpupool.pool.launchers.base import DIE_S

_ANSWER_S = 2.0  # a rank that has not answered by then is stuck
_ABORT_S = 10.0  # NCCL's waits for its kernels: ABORT_S in engine/group/abort.py
# To form a group on gloo takes milliseconds. NCCL looks at the machine's topology and connects each
# GPU to each other one. To join, a rank on NCCL finishes its aborts.
_JOIN_S = {"gloo": 30.0, "nccl": _ABORT_S + 5.0}
_FORM_S = {"gloo": 30.0, "nccl": 120.0}
_NUM_ATTEMPTS = 4  # all but the first with new listeners, as another user may disturb
_NUM_WARNINGS = 3
_OF_SHARED_MEMORY = re.compile(r"shared memory|/dev/shm|No space left on device")


class Forming:
    """Forms the group of all ranks of a pool; `generation` is the number of the last one."""

    def __init__(self, engines: Engines) -> None:
        self.generation = 0
        self._engines = engines
        self._aborting: list[Future[Any]] = []

    def form(self, backend: str, training_ranks: Sequence[int], training_backend: str) -> None:
        """Form the group, one generation higher.

        Raises:
            GroupError: it cannot be formed, and all ranks are there.
            PoolError: as above, and a rank is not there.
        """
        plan = GroupPlan("", backend, list(training_ranks), training_backend)
        failed: PoolError | None = None
        for _ in range(_NUM_ATTEMPTS):
            wait_futures(self._aborting, timeout=_ABORT_S)
            self._aborting.clear()
            try:
                self._form(plan)
                return
            except PoolError as error:
                self.abort(None)
                if isinstance(error, EngineDiedError):  # there is no group without it
                    raise
                failed = failed or error  # the others only hear that somebody does not come
                if isinstance(error, UnansweredError):
                    self._kill(error.ranks)
                    raise EngineDiedError(self._explained(error, failed.ranks)) from failed
        assert failed is not None
        message = f"the process group was not formed: {self._explained(failed, failed.ranks)}"
        raise GroupError(message, ranks=failed.ranks) from failed

    def abort(self, numbers: Mapping[int, int | None] | None) -> None:
        """Have ranks leave their collectives; returns at once.

        The group is not formed again before they have: a rank that hears it later would abort the
        new one.

        Args:
            numbers: rank -> the call that is interrupted as well; None: all ranks, and no call.
        """
        control = self._engines.control
        if numbers is None:
            self._aborting.extend(control(Abort()).values())
            return
        for rank, number in numbers.items():
            self._aborting.extend(control(Abort(number), [rank]).values())

    def is_in_step(self, ranks: Sequence[int]) -> bool:
        """Whether a cell that has failed on these ranks has left the group as good as it was.

        One rank may have ended a collective that another has not begun: a small broadcast ends on
        its source when it is sent. The next one of the two would then be another one. (Nobody
        counts the messages from one rank to another.)
        """
        if len(self._engines.pids) == 1:
            return True
        asked = self._engines.control(Counts(), ranks)
        done, late = wait_futures(asked.values(), timeout=_ANSWER_S)
        counts = [future.result().found or {} for future in done]
        return not late and all(
            one.get(name, number) == number
            for other in counts
            for name, number in other.items()
            for one in counts
        )

    def wait_until_gone(self, ranks: Sequence[int]) -> None:
        """Return when these ranks, which were killed, are known to be gone, or after `DIE_S`."""
        engines = self._engines
        with engines.changed:
            engines.changed.wait_for(lambda: not set(ranks) & {*engines.alive_ranks()}, DIE_S)

    def _kill(self, ranks: Sequence[int]) -> None:
        """End ranks that do not come, so that they are replaced; returns when they are gone."""
        for rank in ranks:
            self._engines.kill(rank, "did not come to the process group, and was killed")
        self.wait_until_gone(ranks)

    def _explained(self, error: PoolError, ranks: Sequence[int]) -> str:
        """An error, and what NCCL has logged on these ranks."""
        text = str(error)
        for rank in ranks:
            if warnings := _warnings(self._engines.log(rank)):
                text += f" On rank {rank} NCCL wrote: {'; '.join(warnings)}."
        if "NCCL" in text and _OF_SHARED_MEMORY.search(text):
            text = f"{text} {little_shared_memory()}".rstrip()
        return text

    def _form(self, plan: GroupPlan) -> None:
        slower = "nccl" if "nccl" in (plan.backend, plan.training_backend) else "gloo"
        self._engines.call_all(JoinGroup(), timeout_s=_JOIN_S[slower])
        self.generation += 1  # also if it fails: no other one has its number
        store = self._engines.new_file(f"group{self.generation}")
        call = FormGroup(replace(plan, store_path=str(store)))
        self._engines.call_all(call, timeout_s=_FORM_S[slower])


def _warnings(log: str) -> list[str]:
    """The last lines of a rank's log in which NCCL warns."""
    lines = [line.strip() for line in log.splitlines() if "NCCL WARN" in line]
    return list(dict.fromkeys(lines))[-_NUM_WARNINGS:]
