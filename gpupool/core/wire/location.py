"""Where a rank is at one moment: its line, its collective, in words. Runs anywhere.

An engine answers with it while its main thread is blocked (`gpupool/engine/group/location.py`);
the client compares those of all ranks (`gpupool/pool/calls/hang_watch.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
_SHAPE = re.compile(r"(\w+)\[([\d, ]*)\]")  # of one tensor, as in `Collective.values`
_UNEVEN = ("all_to_all", "alltoall")  # in these each rank may give something else


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of torch.distributed, as one rank takes part in it.

    `op` is such as "all_reduce"; `seq` counts those of its group, 0 where torch does not number
    them (send, recv, monitored_barrier). `ranks` are the global ranks that take part, `group` is
    torch's name of their group. `since_s`: seconds since it was called, 0 where torch does not say.
    `values` is what it was called with, such as "float32[4]".
    """

    op: str
    seq: int = 0
    ranks: tuple[int, ...] = ()
    since_s: float = 0.0
    values: str = ""
    group: str = ""

    def matches(self, other: Collective) -> bool:
        """Whether two ranks that are in these two are in the same one."""
        if self.op in POINT_TO_POINT:
            receives = (self.op in ("recv", "irecv"), other.op in ("recv", "irecv"))
            return other.op in POINT_TO_POINT and receives[0] != receives[1]
        return (self.op, self.seq, self.group) == (other.op, other.seq, other.group)

    def disagrees(self, other: Collective) -> bool:
        """Whether two ranks are in the same one with tensors that do not go together."""
        sizes = self.values and other.values and not self.op.startswith(_UNEVEN)
        return bool(sizes) and _amount(self.values) != _amount(other.values) and self.matches(other)

    def precedes(self, other: Collective) -> bool:
        """Whether a rank that is in the other one was in this one before, or never comes to it."""
        if self.op in POINT_TO_POINT or other.op in POINT_TO_POINT:
            return False
        return self.group == other.group and 0 < self.seq < other.seq

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Collective:
        """The inverse of `dataclasses.asdict`, after JSON too."""
        return cls(**{**plain, "ranks": tuple(plain["ranks"])})


def _amount(values: str) -> tuple[str, int]:
    """The type of a tensor and how many numbers it has: all that the ranks must agree in."""
    found = _SHAPE.fullmatch(values)
    return (found[1], prod(map(int, filter(None, found[2].split(", "))))) if found else (values, 0)


@dataclass(frozen=True, slots=True)
class Location:
    """What a rank does at this moment.

    `line` is the innermost one of the user's: "Cell In[3], line 2", "train.py, line 7", or "".
    `function` is the function of torch.distributed that the main thread has called, "" outside of
    them. `cpu_s` is what the main thread has computed since it was started. `idle`: no call runs.
    `imports`: a library is being imported, which is not cut off. `queued`: the collective waits in
    the queue of a device, and the host has continued to `line`; nobody knows where it was called.
    `also` are collectives that are under way besides, called with `async_op=True`. `last`, if it
    was asked for: of each group the last collectives that are over, the newest last.
    """

    line: str = ""
    collective: Collective | None = None
    function: str = ""
    cpu_s: float = 0.0
    idle: bool = False
    imports: bool = False
    also: tuple[Collective, ...] = ()
    last: tuple[Collective, ...] = ()
    queued: bool = False

    @property
    def doing(self) -> str:
        """The collective in words: "all_reduce", "reduce_scatter (all_reduce)", or "".

        Without its number: torch counts since the pool began, which nobody can find in a cell.
        """
        if self.collective is None:
            return self.function
        name = self.collective.op
        if self.function not in ("", self.collective.op):
            return f"{self.function} ({name})"
        return name

    @property
    def place(self) -> str:
        """ "all_reduce at Cell In[3], line 2", or as much of it as there is."""
        joint = ", queued at or before " if self.queued else " at "
        return joint.join(part for part in (self.doing, self.line) if part)

    @property
    def was(self) -> str:
        """As in `RankError`: "in all_reduce (Cell In[3], line 2)" or "at Cell In[3], line 7"."""
        if self.doing:
            line = f"queued at or before {self.line}" if self.queued else self.line
            return f"in {self.doing} ({line})" if self.line else f"in {self.doing}"
        return f"at {self.line}" if self.line else ""

    def __str__(self) -> str:
        if self.idle and self.collective is None:
            return "idle"
        place = self.place or "code without a line of yours"
        if self.collective is not None and self.collective.since_s >= 1:
            return f"{place}, for {self.collective.since_s:.0f} s"
        return place

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Location:
        """The inverse of `dataclasses.asdict`, after JSON too."""
        collective = plain.get("collective")
        return cls(
            **{
                **plain,
                "collective": collective and Collective.from_dict(collective),
                "also": tuple(Collective.from_dict(one) for one in plain.get("also", ())),
                "last": tuple(Collective.from_dict(one) for one in plain.get("last", ())),
            }
        )
