"""What a training, and what else runs a network over data, is given. Runs anywhere.

It is packed here, as values of cells are (`core/wire/pickles.py`): ranks map its tensors, and those
of a GPU come to the GPU of the rank, whatever its number was in the notebook. But functions and
classes of the notebook come with the globals that they use, as they are now.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupool.core.network import NetworkInfo
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.pickles import WHOLE, DataPacker, part


@dataclass(frozen=True)
class TrainingJob:
    model: Any
    dataset: Any
    loss: Any
    options: TrainingOptions
    validation: Any
    network: NetworkInfo | None = None
    """What the network will know: the classes and the normalization of its data."""
    num_classes: int = 0
    """So many outputs the data need; 0 where that is not known."""


@dataclass(frozen=True)
class InferenceJob:
    """A network over a data set, in its own order; `metrics` and `loss` are to be evaluated."""

    model: Any
    dataset: Any
    options: TrainingOptions
    metrics: Any = ()
    loss: Any = None
    num_classes: int = 0
    network: NetworkInfo | None = None
    """What the network knows; not every module keeps attributes on its way to the ranks."""
    transform: Any = None
    """What pictures without a data set go through."""
    keeps_targets: bool = False
    """Whether outputs come with the targets of their samples."""


class JobPacker(DataPacker):
    """Packs a job; the first `num_data` of the `buffers` are of its data sets, and `constants` the
    parcels that it refers to. `parcel_of` gives the number of an object's, None if it has none."""

    def __init__(self, parcel_of: Callable[[object], int | None]) -> None:
        super().__init__()
        self.num_data = 0
        self.constants: set[int] = set()
        self._parcel_of = parcel_of

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TrainingJob | InferenceJob):
            rest = dict(vars(obj))
            data = {name: rest.pop(name) for name in ("dataset", "validation") if name in rest}
            # pickle walks in order: what has come before the mark is of the data sets
            return _job, (type(obj), data, _Mark(), rest)
        if isinstance(obj, _Mark):
            self.num_data = len(self.buffers)
            return _Mark, ()
        number = self._parcel_of(obj)
        if number is not None:
            self.constants.add(number)
            return part, (number, WHOLE)
        if "numpy" in sys.modules:
            mapped = _mapped_file(obj, sys.modules["numpy"])
            if mapped is not None:
                return mapped
        return super().reducer_override(obj)


class _Mark:
    """Stands between the data sets and the rest of a job."""


def _job(kind: Callable[..., Any], data: dict[str, Any], _: _Mark, rest: dict[str, Any]) -> Any:
    return kind(**data, **rest)


def _mapped_file(obj: Any, numpy: Any) -> Any:
    """How a file that the notebook has mapped is pickled: ranks map it too. None of others."""
    if type(obj) is not numpy.memmap:
        return None
    # The offset is that of the whole array; and "c" may differ from the file. These are sent as
    # plain arrays: numpy leaves the data of no other kind out of a pickle.
    is_part = isinstance(obj.base, numpy.ndarray)
    if is_part or obj.filename is None or obj.mode == "c" or not Path(obj.filename).is_file():
        return numpy.asarray, (numpy.asarray(obj),)
    order = "C" if obj.flags.c_contiguous else "F"
    mode = "r" if obj.mode == "r" else "c"  # what a rank writes is its own
    return numpy.memmap, (obj.filename, obj.dtype, mode, obj.offset, obj.shape, order)
