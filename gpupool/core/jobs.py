"""What a training, and what else runs a network over data, is given: packed into a file. Anywhere.

It goes through a file in the pool's private folder, as models are large. Tensors and arrays are in
it as values of cells are (`core/wire/pickles.py`): ranks map them, and those of a GPU come to the
GPU of the rank, whatever its number was in the notebook.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupool.core.network import NetworkInfo
from gpupool.core.options.sampling import in_order
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.pickles import DataPacker, Packed, Source, write_file

_LENGTH = struct.Struct("<Q")


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


def pack(part: object) -> DataPacker:
    """A job, or a part of it, ready to be written. Raises whatever pickling runs into."""
    packer = DataPacker()
    packer.dump(part)
    return packer


def write(
    path: Path,
    job: DataPacker,
    sys_path: Sequence[str],
    sources: Mapping[str, tuple[int, str]],
) -> None:
    """Leave a job in a file, with where the notebook finds modules, and the text of the cells that
    its code is of: file name -> (number of the cell, its text)."""
    # At the end, behind what is mapped: a rank needs it before it unpickles the job.
    sizes = [(buffer.nbytes, buffer.readonly) for buffer in job.buffers]
    before = pickle.dumps((list(sys_path), dict(sources), sizes))
    with path.open("wb") as file:
        write_file(file.fileno(), job.buffers, job.stream())
        file.seek(0, 2)
        file.write(before + _LENGTH.pack(len(before)))


def read(path: str) -> tuple[list[str], dict[str, tuple[int, str]], Source]:
    """Where the notebook finds modules, the text of its cells, and the job, which is to be loaded
    when both are known."""
    with open(path, "rb") as file:
        file.seek(-_LENGTH.size, 2)
        (length,) = _LENGTH.unpack(file.read())
        file.seek(-_LENGTH.size - length, 2)
        # The client wrote this file into the pool's private folder; it is as trusted as a cell.
        sys_path, sources, sizes = pickle.loads(file.read(length))  # nosec B301
    return sys_path, sources, Source(Packed(b"", sizes, (), path))
