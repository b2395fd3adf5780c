"""What a cell or function left on each rank. Runs on the client; draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.wire.pickles import unpack
from gpupool.core.wire.replies import CodeReply
from gpupool.pool.calls.output import RankOutput


class SpmdResult(Mapping[int, Any]):
    """One value per rank, and what each printed.

    `result[rank]` is the function's return value, or the value of the cell's last expression;
    `outputs[rank]` is what the rank has shown. `cell_number` is the notebook's number of the cell,
    None for what is no cell of it.
    """

    def __init__(
        self,
        replies: Mapping[int, CodeReply],
        outputs: Mapping[int, RankOutput],
        elapsed_s: float,
        cell_number: int | None = None,
    ) -> None:
        self.elapsed_s = elapsed_s
        self.cell_number = cell_number
        # The notebook's number of the cell that has shown it, and what of it; set by a view.
        self.shown: tuple[int, Any] = (-1, "nothing")
        self.outputs = dict(sorted(outputs.items()))
        self._replies = dict(sorted(replies.items()))
        self._values: dict[int, Any] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran."""
        return tuple(self._replies)

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._values:
            reply = self._reply(rank)
            if reply.packed is None and reply.text:
                raise PoolError(
                    f"the value of rank {rank} stays there: it cannot be pickled, or is larger "
                    "than a cell sends along. Its text is result.value_text(rank); pool.run with a "
                    "function returns values of any size.",
                    ranks=[rank],
                )
            self._values[rank] = unpack(reply.packed) if reply.packed else None
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def text(self, rank: int) -> str:
        """What the rank printed, stdout and stderr together, also after the call had ended."""
        self._reply(rank)
        return self.outputs[rank].text

    def value_text(self, rank: int) -> str:
        """The repr of the rank's value; empty where it is None."""
        return self._reply(rank).text

    def rank_elapsed_s(self, rank: int) -> float:
        """Seconds the code took on the rank."""
        return self._reply(rank).elapsed_s

    def _reply(self, rank: int) -> CodeReply:
        if rank not in self._replies:
            listed = ", ".join(map(str, self._replies))
            raise PoolError(
                f"rank {rank} did not take part in this run; these did: {listed}.", ranks=[rank]
            )
        return self._replies[rank]

    def __repr__(self) -> str:
        return f"SpmdResult({rank_count(len(self))}, {self.elapsed_s:.2f} s)"
