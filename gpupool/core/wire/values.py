"""What crosses of variables: values for a rank, and what is said of its own. Runs anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupool.core.wire.pickles import Packed

# name -> a name on the rank, and the path of attributes from there
Aliases = Mapping[str, tuple[str, Sequence[str]]]


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
    """Modules of the user's that the notebook has loaded again: how often each."""

    times: Mapping[str, int]
    sys_path: Sequence[str]


@dataclass(frozen=True)
class Values:
    """Values of the notebook for a rank: `parcels` by number, and what names mean with them.

    Of parcels that came earlier, `wanted` are still of use.
    """

    parcels: Sequence[tuple[int, Packed]]
    numbers: Mapping[str, int]
    aliases: Aliases
    wanted: Sequence[int]
    place: Place
    sources: Sources


@dataclass(frozen=True)
class Job:
    """A training, or a pass over a data set: see `core/jobs.py`. `requests.Stop` has its `name`."""

    name: str
    packed: Packed
    sys_path: Sequence[str]
    sources: Sources


@dataclass(frozen=True)
class Bindings:
    """What names mean on a rank while a call runs, and what is imported: `modules` are names,
    `imports` statements. `names`, which the call binds, are reported on."""

    values: Values
    modules: Sequence[str]
    imports: Sequence[str]
    names: Sequence[str]


@dataclass(frozen=True)
class ValueInfo:
    """What is known of a rank's value without fetching it; `text` is a short repr if asked for."""

    type: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    length: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        """
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
