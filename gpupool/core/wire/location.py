"""Where a rank is at one moment: its line, its collective, in words. Runs anywhere.

An engine answers with it while its main thread is blocked (`gpupool/engine/group/location.py`);
the client compares those of all ranks (`gpupool/pool/calls/diagnosis.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POINT_TO_POINT = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of torch.distributed, such as "all_reduce", as one rank takes part in it.

    `seq` counts those of its group, 0 where torch does not number them (send, recv,
    monitored_barrier). `ranks` are global ones, `group` is torch's name. `since_s`: seconds since
    it was called, 0 where torch does not say. `values` is what it got, such as "float32[4]".
    """

    op: str
    seq: int = 0
    ranks: Sequence[int] = ()
    since_s: float = 0.0
    values: str = ""
    group: str = ""

    @property
    def number(self) -> int:
        """Which one of its group's it is, where all members take part in each; else 0."""
        return 0 if self.op in POINT_TO_POINT else self.seq

    @property
    def key(self) -> tuple[str, int, str]:
        """What is the same on all ranks that are in it."""
        return self.op, self.seq, self.group

    def matches(self, other: Collective) -> bool:
        """Whether two ranks that are in these two are in the same one."""
        if self.op in POINT_TO_POINT and other.op in POINT_TO_POINT:
            return ("recv" in self.op) != ("recv" in other.op)
        return self.key == other.key


@dataclass(frozen=True, slots=True)
class Location:
    """What a rank does at this moment.

    `line` is the innermost one of the user's: "Cell In[3], line 2", "train.py, line 7", or "".
    `function` is that of torch.distributed that the main thread is in, `cpu_s` what this thread has
    computed since it was started. `idle`: no call runs. `queued`: the collective waits in the queue
    of a device, and the host has continued to `line`; nobody knows where it was called. `last` has
    of each group the last collective that is over.
    """

    line: str = ""
    collective: Collective | None = None
    function: str = ""
    cpu_s: float = 0.0
    idle: bool = False
    last: Sequence[Collective] = ()
    queued: bool = False

    @property
    def doing(self) -> str:
        """The collective, as "reduce_scatter (all_reduce)"; not its number, which no cell shows."""
        if self.collective is None:
            return self.function
        name = self.collective.op
        return f"{self.function} ({name})" if self.function not in ("", name) else name

    @property
    def spot(self) -> str:
        """The line, as far as it is known to be that of the collective."""
        return f"queued at or before {self.line}" if self.line and self.queued else self.line

    @property
    def was(self) -> str:
        """As in `RankError`: "in all_reduce (Cell In[3], line 2)" or "at Cell In[3], line 7"."""
        if self.doing:
            return f"in {self.doing} ({self.spot})" if self.line else f"in {self.doing}"
        return f"at {self.line}" if self.line else ""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Location:
        """The inverse of `dataclasses.asdict`, after JSON too."""
        found, last = plain["collective"], [Collective(**one) for one in plain["last"]]
        return cls(**{**plain, "collective": found and Collective(**found), "last": last})
