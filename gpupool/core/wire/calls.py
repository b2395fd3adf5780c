"""Every call of a rank that the client may make: the one list of them. Runs anywhere.

A call crosses as it is; `gpupool/engine/entry.py` serves it, and answers with a `Reply` of what
stands in the brackets of `Call`.

`invoke` is the one function that travels to the engines. ipyparallel runs it in the engine's own
copy of this module: so the client imports no code of the engine's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

from gpupool.core.wire.pickles import Packed
from gpupool.core.wire.replies import CodeReply, DebugReply, Reply, TrainReply, Value
from gpupool.core.wire.values import Bindings, Job, Place, Reloaded, Sources, ValueInfo, Values


@dataclass(frozen=True)
class Call(Generic[Value]):
    """One call; an interrupt knows it by `number`. Without one it cannot be interrupted.

    What the rank shows meanwhile is the user's where `is_shown`. `torch_settings` are the
    notebook's when it is made.
    """

    is_shown: ClassVar[bool] = False
    what: ClassVar[str] = "a cell"
    number: int | None = field(default=None, kw_only=True)
    reloaded: Reloaded | None = field(default=None, kw_only=True)
    torch_settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def title(self) -> str:
        """What runs, for whoever waits for it."""
        return self.what


def torch_settings() -> dict[str, Any]:
    """Function of torch that sets it -> what is set here; nothing while torch is not imported."""
    found = {}
    for name in ("default_dtype", "float32_matmul_precision", "deterministic_debug_mode"):
        # A thread may just be importing torch; and torch refuses to tell a mixture of precisions.
        with contextlib.suppress(AttributeError, RuntimeError):
            found[f"set_{name}"] = getattr(sys.modules.get("torch"), f"get_{name}")()
    return found


def _nobody(call: Call[Any]) -> Reply[Any]:
    raise RuntimeError(f"{type(call).__name__}: this process is no engine, and serves no calls")


serve: Callable[[Call[Any]], Reply[Any]] = _nobody
"""Serves a call in this process; `gpupool/engine/entry.py` puts the real one here."""


def invoke(call: Call[Any]) -> Reply[Any]:
    return serve(call)


@dataclass(frozen=True)
class BoundCall(Call[Value]):
    """A call that runs with values of the notebook in place, if any variable travels; its reply has
    `names` and `lost`."""

    bindings: Bindings | None = field(default=None, kw_only=True)


# ---- the rank, its group and its environment ------------------------------------------------


@dataclass(frozen=True)
class Prepare(Call[None]):
    """Make the engine's names, search path, folder and umask the notebook's."""

    place: Place


@dataclass(frozen=True)
class WarmUp(Call[None]):
    """Begin to use the rank's device, so that the group does not have to wait for that."""


@dataclass(frozen=True)
class GroupPlan:
    """How the pool forms its group; ranks meet at `store`, the path of a file.

    Of several hosts it is "ADDRESS:PORT", where anybody on the network can read and write: what the
    ranks say of themselves there is signed with `key`.
    """

    store: str
    backend: str
    training_ranks: Sequence[int]
    training_backend: str
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class JoinGroup(Call[str]):
    """Get ready to form the process group of all ranks; rank 0 of several hosts gives the store."""


@dataclass(frozen=True)
class FormGroup(Call[None]):
    """Form the process group of all ranks; returns when every rank has."""

    plan: GroupPlan


# ---- the user's code and variables -----------------------------------------------------------


@dataclass(frozen=True)
class RunSource(BoundCall[CodeReply]):
    """Run a cell; it `waits` until the device has computed all that it was given."""

    is_shown = True
    source: str
    cell_number: int | None  # None: it is no cell of the notebook
    waits: bool = True

    @property
    def title(self) -> str:
        return f"cell In[{self.cell_number}]" if self.cell_number else self.what


@dataclass(frozen=True)
class RunFunction(BoundCall[CodeReply]):
    """Call a packed (function, args, kwargs); `sources` are of its code."""

    is_shown = True
    what = "a function"
    packed: Packed
    sources: Sources


@dataclass(frozen=True)
class RunTask(RunFunction):
    """The same on one rank alone, which has no process group meanwhile."""

    what = "a task"


@dataclass(frozen=True)
class DebugCommand(Call[DebugReply]):
    """Give a command to the debugger; None begins."""

    is_shown = True
    line: str | None


@dataclass(frozen=True)
class Receive(Call[Mapping[int, str]]):
    """Receive values of the notebook; gives number -> reason for those that cannot be read."""

    values: Values


@dataclass(frozen=True)
class Bind(BoundCall[None]):
    """Let names mean values of the notebook."""


@dataclass(frozen=True)
class Look(Call[ValueInfo | None]):
    """Say what the rank's value of a name is; None if it has none."""

    name: str
    path: Sequence[str]
    text_chars: int


@dataclass(frozen=True)
class Attributes(Call[Sequence[str]]):
    """The public attributes of the rank's value of a name."""

    name: str
    path: Sequence[str]


@dataclass(frozen=True)
class Fetch(Call[Packed]):
    """The rank's value of a name; a large one goes to `out_path`, a path or a name."""

    name: str
    path: Sequence[str]
    out_path: str


@dataclass(frozen=True)
class FetchState(Call[Packed]):
    """The rank's values of several names, written to the file `out_path`: see `Fetch`."""

    names: Sequence[str]
    out_path: str


@dataclass(frozen=True)
class SyncState(BoundCall[None]):
    """Give names the meaning that `FetchState` has found; None on ranks that keep theirs."""

    packed: Packed | None


# ---- training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Train(Call[TrainReply]):
    """Train as the job says; the first rank leaves the weights in the pool's `result_name`.

    `again`: resume from the checkpoints of an attempt before. `num_ranks` train; 0: all that can.
    """

    is_shown = True
    what = "a training"
    job: Job
    result_name: str
    again: bool = False
    num_ranks: int = 0


@dataclass(frozen=True)
class Predict(Call[None]):
    """Run a model over this rank's samples; the outputs go to `result_name`.N, as in `Train`."""

    is_shown = True
    what = "a prediction"
    job: Job
    result_name: str


@dataclass(frozen=True)
class Evaluate(Call[Mapping[str, float]]):
    """Loss and metrics of a model over the samples, the same on every rank."""

    is_shown = True
    job: Job


@dataclass(frozen=True)
class Confusion(Call[Sequence[Sequence[int]] | None]):
    """This rank's samples by true and predicted class; None if it has none."""

    is_shown = True
    job: Job
