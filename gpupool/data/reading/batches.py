"""A batch: of samples, or of a data set that is read here. On engines and in their workers; torch.

Samples may have any structure. Pairs (input, target) become a batch of two halves; rows with named
columns become a dict of columns; anything else becomes what torch's `default_collate` makes of it,
or what the user's own function does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.augmentation import generators, restore, seeded
from gpupool.data.reading.samples import Draw, Samples, Skipped, numbered
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import pinned

Collate = Callable[[list[Any]], Any]
Keyed = Callable[[Draw | None, int], AbstractContextManager[object]]


class Batch(NamedTuple):
    """Samples with the batch as first dimension; `inputs` and `targets` are None if `num` is 0.

    Where samples are no pairs (input, target), `inputs` has all of the batch, and `targets` is
    None. `skipped` are those that could not be read and are not among the `num` that are here.
    """

    inputs: Any
    targets: Any
    num: int
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How batches are read.

    `draw` keys the random numbers of augmentation; `skip` leaves out samples that raise SampleError
    and lists them in the batch; `collate` is the user's function that makes a batch of a list.
    """

    draw: Draw | None = None
    skip: bool = False
    collate: Collate | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def pin(self) -> bool:
        return self.device.type == "cuda"


class Rows:
    """A map-style data set, read in this thread.

    An index may be k times its length larger: that is a sample which comes for the (k + 1)th time,
    with random numbers of its own.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._is_ours = isinstance(dataset, Samples)
        self._num = len(dataset)
        self._gives_many = hasattr(dataset, "__getitems__") and not self._is_ours

    def batch(self, indices: Indices, reading: Reading) -> Batch:
        """The samples as a batch. What it draws leaves the generators where they were."""
        if is_table(self.dataset) and reading.collate is None:
            # what collating row by row comes to, in one go
            at = torch.tensor(indices, device="cpu")
            halves = [tensor[at] for tensor in self.dataset.tensors]
            inputs, targets = pinned(halves) if reading.pin else halves
            return Batch(inputs, targets, len(indices))
        before = generators() if reading.draw is not None else b""
        try:
            return made(self.samples(indices, reading), indices, reading)
        finally:
            if before:
                restore(before)

    def samples(self, indices: Indices, reading: Reading) -> list[Any]:
        """The samples, with a `Skipped` for each that is left out."""
        places = indices.tolist()
        many = self._many(places, reading) if self._gives_many and places else None
        return many or [self._sample(place, reading) for place in places]

    def _many(self, places: list[int], reading: Reading) -> list[Any] | None:
        """What the data set gives in one call, as those of Hugging Face do much quicker; None if
        they must be read one by one."""
        with seeded(reading.draw, places[0]) as draws:
            before = generators()
            try:
                samples = list(self.dataset.__getitems__([place % self._num for place in places]))
            except SampleError:
                if not reading.skip:
                    raise
                return None
            has_drawn = getattr(draws, "has_drawn", False) or generators() != before
        # What one call draws for several samples is not that of each of them alone.
        self._gives_many = reading.draw is None or not has_drawn
        return samples if self._gives_many else None

    def _sample(self, place: int, reading: Reading) -> Any:
        again, row = divmod(place, self._num)
        try:
            with seeded(reading.draw, place):
                if not self._is_ours:
                    return self.dataset[row]
                draw = numbered(reading.draw, again)
                return self.dataset.decode(row, self.dataset.fetch(row), draw)
        except SampleError as error:
            if not reading.skip:
                raise
            return Skipped.of(error)


def made(
    samples: Sequence[Any], indices: Indices, reading: Reading, keyed: Keyed = seeded
) -> Batch:
    """The batch of samples; what a `collate` draws, the first index keys."""
    draw = None if reading.collate is None else reading.draw
    with keyed(draw, -1 - int(indices[0])):  # no sample's own
        return batch_of(samples, reading.pin, reading.collate, indices)


def is_table(dataset: Any) -> bool:
    """Whether rows are taken out of two tensors in memory, which draws nothing."""
    return type(dataset) is TensorDataset and len(dataset.tensors) == 2


def batch_of(
    read: Sequence[Any],
    pin: bool,
    collate: Collate | None = None,
    indices: Indices | Sequence[int] = (),
) -> Batch:
    """The batch of samples and, among them, `Skipped` ones, in the order in which they came.

    What `collate` gives is a pair of halves, or all of the batch. Samples of a stream have no
    `indices`.
    """
    samples = [sample for sample in read if not isinstance(sample, Skipped)]
    skipped = tuple(sample for sample in read if isinstance(sample, Skipped))
    if not samples:
        return Batch(None, None, 0, skipped)
    for place, sample in enumerate(read):
        if sample is None:
            # A `collate` may leave it out: then the batch counts for more than is in it.
            which = f"sample {indices[place]}" if len(indices) else "a sample"
            raise DataError(
                f"{which} of the data set is None. Raise gpupool.SampleError there, and give "
                'on_error="skip": then it is left out and counted nowhere',
                "no sample",
            )
    made = _collated_samples(samples, pin) if collate is None else collate(samples)
    if pin:
        made = pinned(made)
    inputs, targets = made if _is_pair(made) else (made, None)
    return Batch(inputs, targets, len(samples), skipped)


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, (tuple, list)) and len(sample) == 2


def _collated_samples(samples: list[Any], pin: bool) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _column(name, samples, pin) for name in first}
    if not all(map(_is_pair, samples)):
        return _collated("samples", list(map(_tensor_of, samples)), pin)
    halves = zip(("inputs", "targets"), zip(*samples, strict=True), strict=True)
    return tuple(_collated(name, list(map(_tensor_of, values)), pin) for name, values in halves)


def _column(name: str, rows: Sequence[Mapping[str, Any]], pin: bool) -> Any:
    """A column of some rows. The error, if no batch can be made of it: not every column is used."""
    try:
        return _collated(name, [_numbers_of(row[name]) for row in rows], pin)
    except KeyError:
        return DataError(f"some samples have a column {name!r}, and some have none", "no column")
    except DataError as error:
        return error.with_traceback(None)


def _tensor_of(value: Any) -> Any:
    """A picture of Pillow as uint8 (channels, height, width)."""
    if not hasattr(value, "getbands"):  # Pillow itself is not imported for that
        return value
    picture = value if value.mode in ("L", "RGB") else value.convert("RGB")
    array = np.array(picture)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)


def _numbers_of(value: Any) -> Any:
    """A list of numbers as one tensor, as data sets of Hugging Face give them: torch would make one
    tensor for each place."""
    if isinstance(value, list):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # words, or lists of several lengths
            return value
    return _tensor_of(value)


def _collated(name: str, values: list[Any], pin: bool) -> Any:
    """Raises DataError for what cannot be together: torch's own errors do not say what to do."""
    arrays = [value for value in values if isinstance(value, (Tensor, np.ndarray))]
    shapes = sorted({tuple(value.shape) for value in arrays})
    kinds = sorted({str(getattr(value, "dtype", type(value).__name__)) for value in values})
    if len(shapes) > 1:
        shown = ", ".join(" x ".join(map(str, shape)) for shape in shapes[:3])
        raise DataError(
            f"the {name} of one batch differ in size ({shown}); give images one size with "
            "ds.with_transform(torchvision.transforms.v2.Resize((height, width))), and pad others "
            "in train(..., collate=function), as torch.nn.utils.rnn.pad_sequence does",
            "sizes",
        )
    told = f"no batch can be made of these {name} ({', '.join(kinds)}); change what the transform "
    told += "or the data set returns"
    if arrays and len(kinds) > 1:
        raise DataError(told, "types")
    try:
        return _stacked(values, pin) if isinstance(values[0], Tensor) else default_collate(values)
    except (TypeError, RuntimeError, KeyError) as error:
        raise DataError(f"{told}: {error}", "no batch") from None


def _stacked(values: list[Tensor], pin: bool) -> Tensor:
    """Tensors of one shape as one, each laid out as it is: copied so, a picture takes 6 us.

    Decoders put the channels of a pixel side by side.
    """
    first = values[0]
    by_pixel = first.ndim == 3 and first.stride(0) == 1 < first.shape[0]
    parts = [value.permute(1, 2, 0) for value in values] if by_pixel else values
    if pin and first.device.type == "cpu":  # at once where a GPU copies from
        made = torch.empty((len(parts), *parts[0].shape), dtype=first.dtype, pin_memory=True)
        with torch.no_grad():
            torch.stack(parts, out=made)
    else:
        made = default_collate(parts)
    return made.permute(0, 3, 1, 2) if by_pixel else made
