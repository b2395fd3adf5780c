"""The process group of all ranks, one generation after the other. Runs on the client.

Two phases: all ranks join, and only then connect, so that a fast rank cannot break the group
of a slow one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any

from gpupool.core.errors import EngineDiedError, GroupError, PoolError, UnansweredError
from gpupool.core.wire.calls import FormGroup, GroupPlan, JoinGroup
from gpupool.core.wire.requests import Abort, Counts
from gpupool.pool.engines.engines import Engines
from gpupool.pool.launchers.placement import Placement
from gpupool.pool.launchers.processes import DIE_S

_ANSWER_S = 2.0  # a rank that has not answered by then is stuck
_ABORT_S = 10.0  # NCCL's waits for its kernels
_JOIN_S = 30.0  # a rank on NCCL finishes its aborts
# It takes milliseconds on gloo. NCCL looks at the machine's topology and connects each GPU to each
# other one.
_FORM_S = {"gloo": 30.0, "nccl": 120.0}
_NUM_WARNINGS = 3


class Forming:
    """Forms the group of all ranks of a pool; `generation` is the number of the last one."""

    def __init__(self, engines: Engines) -> None:
        self.generation = 0
        self._engines = engines
        self._aborting: list[Future[Any]] = []

    def form(self, placed: Placement) -> None:
        """Form the group, one generation higher.

        Raises:
            GroupError: it was not formed, and all ranks are there.
            EngineDiedError: a rank is not there; one that does not come is killed.
        """
        wait_futures(self._aborting, timeout=_ABORT_S)
        self._aborting.clear()
        slower = "nccl" if "nccl" in (placed.backend, placed.training_backend) else "gloo"
        try:
            server = self._engines.call_all(JoinGroup(), timeout_s=_JOIN_S)[0]
            self.generation += 1  # also if it fails: no other one has its number
            file = self._engines.new_file(f"group{self.generation}").name
            store = server or f"{self._engines.launch.folder_of(0)}/{file}"  # on their one host
            key = secrets.token_hex(32) if server else ""
            training = list(placed.training_ranks)
            plan = GroupPlan(store, placed.backend, training, placed.training_backend, key)
            self._engines.call_all(FormGroup(plan), timeout_s=_FORM_S[slower])
        except PoolError as error:
            self.abort(dict.fromkeys(self._engines.alive_ranks()))
            if isinstance(error, EngineDiedError):
                raise
            text = self._explained(error)
            if isinstance(error, UnansweredError):
                for rank in error.ranks:
                    self._engines.kill(rank, "did not come to the process group, and was killed")
                self.wait_until_gone(error.ranks)
                raise EngineDiedError(text) from error
            message = f"the process group was not formed: {text}"
            raise GroupError(message, ranks=error.ranks) from error

    def abort(self, numbers: Mapping[int, int | None]) -> None:
        """Have ranks leave their collectives; returns at once.

        The group is not formed again before they have: a rank that hears it later would abort the
        new one.

        Args:
            numbers: rank -> the call that is interrupted as well, or None.
        """
        for rank, number in numbers.items():
            self._aborting.extend(self._engines.control(Abort(number), [rank]).values())

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
        counts = {pair for one in done for pair in (one.result().found or {}).items()}
        return not late and len(counts) == len({group for group, _ in counts})

    def wait_until_gone(self, ranks: Sequence[int]) -> None:
        """Return when these ranks, which were killed, are known to be gone, or after `DIE_S`."""
        engines = self._engines
        with engines.changed:
            engines.changed.wait_for(lambda: not set(ranks) & {*engines.alive_ranks()}, DIE_S)

    def _explained(self, error: PoolError) -> str:
        text = str(error)
        for rank in error.ranks:
            lines = [line.strip() for line in self._engines.log(rank).splitlines()]
            warnings = list(dict.fromkeys(line for line in lines if "NCCL WARN" in line))
            if warnings:
                text += f" On rank {rank} NCCL wrote: {'; '.join(warnings[-_NUM_WARNINGS:])}."
        return text


def network_of(log: str) -> str:
    """What the log of a rank says that NCCL sends by between hosts; "" if it says nothing yet.

    >>> network_of("NCCL INFO Using network Socket\\n[0] NCCL INFO Using network AWS Libfabric\\n")
    'AWS Libfabric'
    """
    said: list[str] = re.findall(r"NCCL INFO Using network (.+)", log)
    return said[-1].strip() if said else ""
