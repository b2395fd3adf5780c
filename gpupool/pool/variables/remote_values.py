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


class RemoteValues:
    """Asks ranks for the values of a name, or of an attribute: the `path` from the name to it."""

    def __init__(self, all_ranks: Ranks) -> None:
        self._all_ranks = all_ranks

    def look(
        self,
        name: str,
        path: tuple[str, ...],
        text_chars: int,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, ValueInfo]:
        """Rank -> what its value is; without the ranks that have none."""
        found = self.ask(Look(name, path, text_chars), ranks)
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
        found = self.ask(Attributes(name, path))
        return sorted({attribute for listed in found.values() for attribute in listed})

    def fetch(self, name: str, path: tuple[str, ...], rank: int) -> Any:
        """The value of one rank.

        Raises:
            PoolError: it has none, or it cannot travel.
        """
        file = MemoryFile()  # the rank writes to it, so that large values are copied once
        packed = self.ask(Fetch(name, path, file.path), [rank])[rank]
        try:
            return Source(packed).load()
        except Exception as error:  # DDP wants a process group, for one
            raise PoolError(
                f"{'.'.join((name, *path))} of rank {rank} cannot be made in the notebook, an "
                f"attribute of it perhaps. {type(error).__name__}: {error}",
                ranks=[rank],
            ) from error

    def ask(self, call: Call[Value], ranks: Sequence[int] | None = None) -> dict[int, Value]:
        """Make a quick call about names.

        Raises:
            PoolError: the ranks are busy, or one has no such value.
        """
        if self._all_ranks.state == "busy":  # it would have to wait for the end of a cell
            raise PoolError("the ranks are busy: ask again when the running cell has ended.")
        chosen = self._all_ranks.engines.alive_ranks() if ranks is None else ranks
        try:
            return Execution(self._all_ranks, dict.fromkeys(chosen, call), unheard_output).result()
        except SpmdError as error:
            first = error.first
            raise PoolError(of_rank(first.rank, first.evalue), ranks=[first.rank]) from None
