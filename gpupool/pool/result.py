"""What a cell or function left on each rank. Runs on the client; draws nothing.

A notebook keeps the result of every cell (`Out`), so results are small: those of the last cells as
they are, older ones packed.
"""

from __future__ import annotations

import pickle
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.wire.pickles import unpack
from gpupool.core.wire.replies import CodeReply
from gpupool.pool.calls.output import OutputRecorder, RankOutput

__all__ = ["OutputRecorder", "RankOutput", "SpmdResult"]

NUM_UNPACKED = 128


class SpmdResult(Mapping[int, Any]):
    """One value per rank, and what each printed.

    `result[rank]` is the function's return value, or the value of the cell's last expression.
    `cell_number` is the notebook's number of the cell, None for what is no cell of it.
    """

    __slots__ = (
        "__weakref__",
        "_outputs",
        "_packed",
        "_replies",
        "_values",
        "cell_number",
        "elapsed_s",
    )

    def __init__(
        self,
        replies: Mapping[int, CodeReply],
        outputs: Mapping[int, RankOutput],
        elapsed_s: float,
        cell_number: int | None = None,
    ) -> None:
        self.elapsed_s = elapsed_s
        self.cell_number = cell_number
        self._outputs: dict[int, RankOutput] | None = dict(sorted(outputs.items()))
        self._replies: dict[int, CodeReply] | None = dict(sorted(replies.items()))
        self._values: dict[int, Any] | None = None
        self._packed = b""
        _keep_small(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran."""
        return tuple(self._all_replies())

    @property
    def outputs(self) -> dict[int, RankOutput]:
        """What each rank has shown."""
        return self._outputs if self._outputs is not None else self._unpacked()[1]

    def __getitem__(self, rank: int) -> Any:
        if self._values is None:
            self._values = {}
        if rank not in self._values:
            reply = self._reply(rank)
            if reply.packed is None and reply.text:
                raise PoolError(
                    f"the value of rank {rank} stays there: it cannot be pickled, or is larger "
                    "than a cell sends along. Its text is result.value_text(rank); pool.run with a "
                    "function returns values of any size.",
                    "no value",
                    ranks=[rank],
                )
            self._values[rank] = None if reply.packed is None else unpack(reply.packed)
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all_replies())

    def __len__(self) -> int:
        return len(self._all_replies())

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

    def pack(self) -> None:
        """Take less memory from now on; what comes later is not added any more."""
        if self._replies is not None and self._outputs is not None:
            outputs = {rank: output.state() for rank, output in self._outputs.items()}
            packed = pickle.dumps((self._replies, outputs), protocol=5)
            self._packed = zlib.compress(packed, 1)
            self._replies = self._outputs = None

    def _unpacked(self) -> tuple[dict[int, CodeReply], dict[int, RankOutput]]:
        replies, states = pickle.loads(zlib.decompress(self._packed))  # nosec B301 # of `pack`
        return replies, {rank: RankOutput.of_state(state) for rank, state in states.items()}

    def _all_replies(self) -> dict[int, CodeReply]:
        return self._replies if self._replies is not None else self._unpacked()[0]

    def _reply(self, rank: int) -> CodeReply:
        replies = self._all_replies()
        if rank not in replies:
            listed = ", ".join(map(str, replies))
            raise PoolError(
                f"rank {rank} did not take part in this run; these did: {listed}.",
                "no part",
                ranks=[rank],
            )
        return replies[rank]

    def __repr__(self) -> str:
        return f"SpmdResult({rank_count(len(self))}, {self.elapsed_s:.2f} s)"


_recent: deque[weakref.ref[SpmdResult]] = deque()  # the latest first
_recent_lock = threading.Lock()


def _keep_small(result: SpmdResult) -> None:
    """Pack what is no longer among the last results; `output.py` cuts long texts before."""
    with _recent_lock:
        _recent.appendleft(weakref.ref(result))
        while len(_recent) > NUM_UNPACKED:
            old = _recent.pop()()
            if old is not None:
                old.pack()
