"""What crosses of variables: values on their way to a rank, and what is said of a rank's own.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupool.core.wire.pickles import Packed

Aliases = Mapping[str, tuple[str, Sequence[str]]]
"""name -> a name on the rank, and the path of attributes from there."""


@dataclass(frozen=True)
class Place:
    """Where the notebook works: its search path for modules, folder ("": deleted) and umask."""

    sys_path: Sequence[str]
    cwd: str
    umask: int


Sources = Mapping[str, tuple[int, str]]
"""File name of a cell, whose code travels -> its number and text."""


@dataclass(frozen=True)
class Reloaded:
    """Modules that the notebook has loaded again: how often each, and where it finds modules."""

    times: Mapping[str, int]
    sys_path: Sequence[str]


@dataclass(frozen=True)
class Values:
    """Values of the notebook for a rank: `parcels` by number, with the `sources` of their code.

    `numbers` and `aliases` say what names mean with them; of parcels that came earlier, `wanted`
    are still of use.
    """

    parcels: Sequence[tuple[int, Packed]]
    numbers: Mapping[str, int]
    aliases: Aliases
    wanted: Sequence[int]
    place: Place
    sources: Sources


@dataclass(frozen=True)
class Job:
    """A training, or a pass over a data set: see `core/jobs.py`. A request to stop has its `name`.

    `sys_path` is where the notebook finds modules.
    """

    name: str
    packed: Packed
    sys_path: Sequence[str]
    sources: Sources


@dataclass(frozen=True)
class Bindings:
    """What names mean on a rank while a call runs: `values`, and what is imported for it.

    `modules` are names, `imports` statements. `names` are those that the call binds, to be reported
    on.
    """

    values: Values
    modules: Sequence[str]
    imports: Sequence[str]
    names: Sequence[str]


@dataclass(frozen=True)
class ValueInfo:
    """What is known of a rank's value without fetching it.

    `type` is its class's name; `shape`, `dtype` and `device` are there for arrays and tensors,
    `length` for what has one; `text` is a short repr, only where it was asked for.
    """

    type: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    length: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        """In a few words.

        >>> str(ValueInfo("Tensor", (2, 3), "float32", "cuda:0")), str(ValueInfo("list", length=4))
        ('Tensor 2x3 float32 cuda:0', 'list of 4')
        """
        if self.shape is not None:
            shape = "x".join(map(str, self.shape)) or "scalar"
            return " ".join(filter(None, (self.type, shape, self.dtype, self.device)))
        return self.type if self.length is None else f"{self.type} of {self.length}"


@dataclass(frozen=True)
class NamesReport:
    """What names mean on a rank after a cell; None: nothing. `changed` are those bound again."""

    info: Mapping[str, ValueInfo | None]
    changed: Sequence[str]
