"""What ranks answer to calls (`calls.py`). Runs anywhere.

A reply is unpickled in the client's IO thread, so it must not make the notebook import anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpupool.core.errors import RankError
from gpupool.core.wire.values import NamesReport

Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Raised:
    """What ended a call: `collective` if a collective raised it, which had begun."""

    error: RankError
    collective: bool = False


@dataclass(frozen=True)
class Reply(Generic[Value]):
    """What a call gave: its `value`, which means nothing if it `raised`.

    `context_lost`: the process can use its GPU no more. `lags`: its device computes behind the
    host; if collectives are aborted, tensors may hold half a sum. `group_wanting`: the pool has to
    form its group again. `lost` are the numbers of parcels to be sent again.
    """

    value: Value
    raised: Raised | None = None
    context_lost: bool = False
    lags: bool = False
    group_wanting: bool = False
    lost: Sequence[int] = ()
    names: NamesReport | None = None


@dataclass(frozen=True)
class CodeReply:
    """What the user's code gave: its value, as `pack` has packed it, and the value's repr.

    `packed` is None where the value is None, and where it cannot travel: then it has a `text`.
    `left`: a cell ended by `exit()` or `sys.exit()`; ranks that wait for this one are to be freed.
    """

    packed: bytes | None
    text: str
    elapsed_s: float
    left: bool = False


@dataclass(frozen=True)
class DebugReply:
    """What the debugger said, and whether it waits for another command."""

    text: str
    is_open: bool


@dataclass(frozen=True)
class TrainReply:
    """What the ranks report beside the events: see `NetworkInfo`."""

    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    input_shape: tuple[int, ...] = ()
