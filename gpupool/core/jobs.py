"""What a training, and what else runs a network over data, is given: packed into a file. Anywhere.

It goes through a file in the pool's private folder, as models are large. Tensors and arrays are in
it as values of cells are (`core/wire/pickles.py`): ranks map them, and those of a GPU come to the
GPU of the rank, whatever its number was in the notebook. Those of data sets are in files that the
client keeps for the next job (`pool/variables/kept_data.py`).
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpupool.core.network import NetworkInfo
from gpupool.core.options.sampling import in_order
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.pickles import DataPacker, map_file, positions, write_file

_LENGTH = struct.Struct("<Q")
_DATA = ("dataset", "validation")  # of a job


@dataclass(frozen=True)
class TrainingJob:
    """A training: `model` on `dataset`, as `options` say."""

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
    """A network over a data set, read and computed as `options` say, in its own order.

    `metrics` and `loss` are what is to be evaluated.
    """

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

    def __post_init__(self) -> None:
        # Outputs come in the order of the samples: no option may change that.
        object.__setattr__(self, "options", in_order(self.options))


class JobPacker(DataPacker):
    """Packs a job; the first `num_data` of the `buffers` are of its data sets."""

    def __init__(self) -> None:
        super().__init__()
        self.num_data = 0

    def dump_job(self, job: TrainingJob | InferenceJob) -> None:
        """Pack a job. Raises whatever pickling runs into."""
        rest = dict(vars(job))
        data = {name: rest.pop(name) for name in _DATA if name in rest}
        # pickle walks in order: what has come before the mark is of the data sets
        self.dump((type(job), data, _Mark(), rest))

    def reducer_override(self, obj: Any) -> Any:
        """How a part is pickled."""
        if isinstance(obj, _Mark):
            self.num_data = len(self.buffers)
            return tuple, ()
        if "numpy" in sys.modules:
            mapped = _mapped_file(obj, sys.modules["numpy"])
            if mapped is not None:
                return mapped
        return super().reducer_override(obj)


class _Mark:
    """Stands between the data sets and the rest of a job."""


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


def write(
    path: Path,
    job: DataPacker,
    sys_path: Sequence[str],
    sources: Mapping[str, tuple[int, str]],
    kept: Mapping[int, tuple[str, int]],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Leave a job in a file, with where the notebook finds modules, and the text of the cells that
    its code is of: file name -> (number of the cell, its text).

    Args:
        kept: buffers by number that are in another file: its path, and where they begin there.
        advance: called with how many bytes more are written, in this thread.
    """
    here = [buffer for number, buffer in enumerate(job.buffers) if number not in kept]
    starts = iter(positions([buffer.nbytes for buffer in here] + [0]))
    parts = [
        _Part(*kept.get(number) or ("", next(starts)), buffer.nbytes, buffer.readonly)
        for number, buffer in enumerate(job.buffers)
    ]
    # At the end, behind what is mapped: a rank needs it before it unpickles the job.
    before = pickle.dumps((list(sys_path), dict(sources), parts, next(starts)))
    with path.open("wb") as file:
        write_file(file.fileno(), here, job.stream(), advance)
        file.seek(0, 2)
        file.write(before + _LENGTH.pack(len(before)))


def read(path: str) -> tuple[list[str], dict[str, tuple[int, str]], JobSource]:
    """Where the notebook finds modules, the text of its cells, and the job, which is to be loaded
    when both are known."""
    with open(path, "rb") as file:
        file.seek(-_LENGTH.size, 2)
        (length,) = _LENGTH.unpack(file.read())
        file.seek(-_LENGTH.size - length, 2)
        # The client wrote this file into the pool's private folder; it is as trusted as a cell.
        sys_path, sources, parts, start = pickle.loads(file.read(length))  # nosec B301
    return sys_path, sources, JobSource(path, parts, start)


class _Part(NamedTuple):
    """A buffer: the file that it is in, "" for that of the job, and where."""

    path: str
    start: int
    num_bytes: int
    readonly: bool


class JobSource:
    """A job that has arrived: its pickle begins at `start` of its file."""

    def __init__(self, path: str, parts: Sequence[_Part], start: int) -> None:
        self._path, self._parts, self._start = path, parts, start

    def load(self, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
        """The job. It may be written to: no other rank sees it."""
        mapped: dict[str, memoryview] = {}
        for path in {"", *(part.path for part in self._parts)}:
            with open(path or self._path, "rb") as file:
                mapped[path] = map_file(file.fileno())
        views = [mapped[part.path][part.start :][: part.num_bytes] for part in self._parts]
        buffers = [
            view.toreadonly() if part.readonly else view
            for view, part in zip(views, self._parts, strict=True)
        ]
        stream = io.BytesIO(mapped[""][self._start :])
        kind, data, _, rest = unpickler(stream, buffers=buffers).load()
        return kind(**data, **rest)
