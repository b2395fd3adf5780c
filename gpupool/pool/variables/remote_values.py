"""What the ranks have by a name, asked for or fetched. Runs on the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpupool.core.errors import PoolError, SpmdError
from gpupool.core.wire.calls import Attributes, Call, Fetch, Look
from gpupool.core.wire.masking import redact
from gpupool.core.wire.pickles import MemoryFile, Source
from gpupool.core.wire.replies import Value
from gpupool.core.wire.values import ValueInfo
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.engines import of_rank
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.losses import Losses


class RemoteValues:
    """Asks ranks for the values of a name, or of an attribute: the `path` from the name to it.

    `losses` says why a value is not there. Nothing is asked while a cell runs.
    """

    def __init__(self, all_ranks: Ranks, losses: Losses) -> None:
        self._all_ranks = all_ranks
        self._losses = losses

    def look(
        self,
        name: str,
        path: tuple[str, ...],
        text_chars: int,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, ValueInfo]:
        """Rank -> what its value is; without the ranks that have none."""
        found = self._ask(Look(name, path, text_chars), name, ranks)
        hidden = self._all_ranks.secrets
        return {
            rank: replace(info, text=redact(info.text, hidden) if info.text else None)
            for rank, info in found.items()
            if info is not None
        }

    def attributes(self, name: str, path: tuple[str, ...]) -> list[str]:
        """The public attributes of the values; none while the ranks are busy."""
        if self._all_ranks.state != "idle":  # who completes a name does not wait
            return []
        found = self._ask(Attributes(name, path), name)
        return sorted({attribute for listed in found.values() for attribute in listed})

    def fetch(self, name: str, path: tuple[str, ...], rank: int) -> Any:
        """The value of one rank.

        Raises:
            PoolError: it has none, or it cannot travel.
        """
        shown = ".".join((name, *path))
        file = MemoryFile()  # the rank writes to it, so that large values are copied once
        call = Fetch(name, path, file.path)
        packed = self._ask(call, name, [rank], f"{shown} of rank {rank}")[rank]
        try:
            return Source(packed).load()
        except Exception as error:  # DDP wants a process group, for one
            raise PoolError(
                f"{shown} of rank {rank} cannot be made in the notebook: "
                f"{type(error).__name__}: {error} An attribute of it may be, as in "
                f"`{shown}.attribute[{rank}]`.",
                ranks=[rank],
            ) from error
        finally:
            file.close()

    def _ask(
        self,
        call: Call[Value],
        name: str,
        ranks: Sequence[int] | None = None,
        wanted: str = "",
    ) -> dict[int, Value]:
        """Make a quick call; not while a cell runs, which it would have to wait for.

        What is `wanted` of the name, in words, may be lost.
        """
        if self._all_ranks.state == "busy":
            raise PoolError("the ranks are busy: ask again when the running cell has ended.")
        chosen = self._all_ranks.engines.alive_ranks() if ranks is None else ranks
        calls = dict.fromkeys(chosen, call)
        try:
            return Execution(self._all_ranks, calls, unheard_output).result()
        except SpmdError as error:
            first = error.first
            lost = self._losses.sentence(name, first.rank, wanted)
            # What the rank raises for a name, or an attribute, that it does not have.
            is_gone = first.ename == "LookupError"
            text = lost if is_gone and lost else of_rank(first.rank, first.evalue)
            raise PoolError(text, ranks=[first.rank]) from None
