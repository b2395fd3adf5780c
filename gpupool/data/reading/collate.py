"""A batch from samples that come in any order, each written where it belongs. Runs on engines.

Samples may have any structure. Pairs (input, target) become a batch of two halves; rows with named
columns become a dict of columns; anything else becomes what torch's `default_collate` makes of it,
or what the user's own function does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.samples import Skipped
from gpupool.data.reading.trees import pinned

Collate = Callable[[list[Any]], Any]


class Batch(NamedTuple):
    """Samples with the batch as first dimension; `inputs` and `targets` are None if `num` is 0.

    Where samples are no pairs (input, target), `inputs` has all of the batch, and `targets` is
    None. `skipped` are those that could not be read and are not among the `num` that are here.
    """

    inputs: Any
    targets: Any
    num: int
    skipped: tuple[Skipped, ...] = ()


class PendingBatch:
    """A batch under way: every row is put, skipped or fails, from any thread, in any order.

    `done` gets the `Batch` when its last row is there, or at once the first error.
    """

    def __init__(
        self,
        indices: Iterable[int],
        *,
        pin: bool,
        skip: bool,
        collate: Collate | None = None,
    ) -> None:
        self.indices = [int(index) for index in indices]
        self.done: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.has_failed = False
        num = len(self.indices)
        self._halves = _Half("inputs", num, pin), _Half("targets", num, pin)
        self._whole: dict[int, Any] = {}  # samples by row that are not copied into halves
        self._skip, self._pin, self._collate = skip, pin, collate
        self._skipped: dict[int, Skipped] = {}
        self._left = num
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int:
        """The memory that one sample takes here; 0 while that is not known."""
        return sum(half.row_bytes for half in self._halves)

    def put(self, row: int, sample: Any) -> None:
        """Write a sample into its row."""
        if self._collate is None and _is_pair(sample):
            for half, value in zip(self._halves, sample, strict=True):
                half.put(row, value)
        else:
            self._whole[row] = sample
        self._count_one()

    def fault(self, row: int, error: BaseException) -> None:
        """Leave a row out if that is wanted and a sample alone is at fault, else fail."""
        if not (self._skip and isinstance(error, SampleError)):
            self.has_failed = True
            self.done.put(error)
            return
        with self._lock:
            self._skipped[row] = Skipped.of(error)
        self._count_one()

    def _count_one(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if not is_last or self.has_failed:
            return
        try:
            self.done.put(self._batch())
        except Exception as error:  # torch's collate: raised again in the thread that asks
            self.has_failed = True
            self.done.put(error)

    def _batch(self) -> Batch:
        rows = [row for row in range(len(self.indices)) if row not in self._skipped]
        skipped = tuple(self._skipped[row] for row in sorted(self._skipped))
        if not rows:
            return Batch(None, None, 0, skipped)
        if self._whole:
            if len(self._whole) < len(rows):
                raise _mixed("samples", {"pairs", type(next(iter(self._whole.values()))).__name__})
            made = batch_of([self._whole[row] for row in rows], self._pin, self._collate)
            return made._replace(skipped=skipped)
        inputs, targets = (half.taken(rows) for half in self._halves)
        return Batch(inputs, targets, len(rows), skipped)


class _Half:
    """The inputs or the targets of a batch.

    Tensors are copied into one that is made for the whole batch when the first of them comes, in
    its memory format (decoders put the channels of a pixel side by side); anything else is collated
    at the end, as torch does it.
    """

    def __init__(self, name: str, num: int, pin: bool) -> None:
        self._name, self._num, self._pin = name, num, pin
        self._stack: Tensor | None = None
        self._values: list[Any] = [None] * num
        self._other_types: set[str] = set()
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int:
        stack = self._stack
        return 0 if stack is None else stack[0].nbytes

    def put(self, row: int, value: Any) -> None:
        value = _tensor_of(value)
        if not isinstance(value, Tensor):
            self._values[row] = value
            self._other_types.add(type(value).__name__)
            return
        # The first sample to come decides shape and type.
        with self._lock:
            if self._stack is None:
                self._stack = self._like(value)
        stack = self._stack
        if value.shape != stack.shape[1:]:
            raise _differing(self._name, {tuple(value.shape), tuple(stack.shape[1:])})
        if value.dtype != stack.dtype:
            raise _mixed(self._name, {str(stack.dtype), str(value.dtype)})
        # Without the lock: each thread writes rows of its own.
        stack[row].copy_(value.detach())

    def _like(self, value: Tensor) -> Tensor:
        """Memory for all rows, each laid out as `value` is: copied so, a picture takes 6 us."""
        by_pixel = value.ndim == 3 and value.stride(0) == 1 < value.shape[0]
        return torch.empty(
            (self._num, *value.shape),
            dtype=value.dtype,
            device="cpu",
            memory_format=torch.channels_last if by_pixel else torch.contiguous_format,
            pin_memory=self._pin,
        )

    def taken(self, rows: list[int]) -> Any:
        if self._stack is None:
            collated = _collated(self._name, [self._values[row] for row in rows])
            return pinned(collated) if self._pin else collated
        if self._other_types:
            raise _mixed(self._name, {"Tensor", *self._other_types})
        if len(rows) == self._num:
            return self._stack
        # The rows of skipped samples were never written.
        some = self._stack[rows]
        return some.pin_memory() if self._pin else some


def batch_of(read: Sequence[Any], pin: bool, collate: Collate | None = None) -> Batch:
    """The batch of samples and, among them, `Skipped` ones, in the order in which they came.

    `collate` is the user's own function; what it gives is a pair of halves, or all of the batch.
    """
    samples = [sample for sample in read if not isinstance(sample, Skipped)]
    skipped = tuple(sample for sample in read if isinstance(sample, Skipped))
    if not samples:
        return Batch(None, None, 0, skipped)
    made = _collated_samples(samples) if collate is None else collate(samples)
    if pin:
        made = pinned(made)
    inputs, targets = made if _is_pair(made) else (made, None)
    return Batch(inputs, targets, len(samples), skipped)


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, (tuple, list)) and len(sample) == 2


def _collated_samples(samples: list[Any]) -> Any:
    """What torch makes of samples; columns of rows one by one, and pictures as tensors."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _column(name, samples) for name in first}
    samples = [_tensor_of(sample) for sample in samples]
    if not all(map(_is_pair, samples)):
        return _collated("samples", samples)
    inputs, targets = zip(*samples, strict=True)
    return _collated("inputs", [*map(_tensor_of, inputs)]), _collated("targets", targets)


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """A column of some rows. The error, if no batch can be made of it: not every column is used."""
    try:
        return _collated(name, [_tensor_of(row[name], is_column=True) for row in rows])
    except KeyError:
        error = DataError(f"some samples have a column {name!r}, and some have none", "no column")
    except DataError as found:
        error = found
    return error.with_traceback(None)


def _tensor_of(value: Any, *, is_column: bool = False) -> Any:
    """A picture of Pillow as uint8 (channels, height, width), numbers of a row as one tensor."""
    if hasattr(value, "getbands"):  # Pillow itself is not imported for that
        picture = value if value.mode in ("L", "RGB") else value.convert("RGB")
        array = np.array(picture)
        return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)
    # Data sets of Hugging Face give lists, of which torch would make one tensor for each place.
    if is_column and isinstance(value, list):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # words, or lists of several lengths
            return value
    return value


def _collated(name: str, values: Sequence[Any]) -> Any:
    shapes = {tuple(value.shape) for value in values if isinstance(value, (Tensor, np.ndarray))}
    # Found here, because the error of torch does not say what to do.
    if len(shapes) > 1:
        raise _differing(name, shapes)
    kinds = {str(value.dtype) for value in values if isinstance(value, Tensor)}
    if kinds and not all(isinstance(value, Tensor) for value in values):
        kinds = {type(value).__name__ for value in values}
    if len(kinds) > 1:
        raise _mixed(name, kinds)
    try:
        return default_collate(list(values))
    except (TypeError, RuntimeError, KeyError) as error:
        shown = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DataError(
            f"no batch can be made of these {name} ({shown}); change what the transform or the "
            f"data set returns: {error}",
            "no batch",
        ) from None


def _differing(name: str, shapes: set[tuple[int, ...]]) -> DataError:
    """The error for images, or others, of several sizes in one batch."""
    shown = [" x ".join(map(str, shape)) for shape in sorted(shapes)[:3]]
    more = ", ..." if len(shapes) > 3 else ""
    if not all(len(shape) == 3 for shape in shapes):  # words, points, boxes
        return DataError(
            f"the {name} of one batch differ in size ({', '.join(shown)}{more}); pad them in a "
            "function that makes the batch, train(..., collate=function), as "
            "torch.nn.utils.rnn.pad_sequence or transformers.DataCollatorWithPadding do",
            "sizes",
        )
    what = "images" if name == "inputs" else name
    return DataError(
        f"the {what} of one batch differ in size ({', '.join(shown)}{more}); give them one size "
        "with ds.with_transform(torchvision.transforms.v2.Resize((height, width)))",
        "sizes",
    )


def _mixed(name: str, kinds: set[str]) -> DataError:
    return DataError(
        f"the {name} of one batch differ in type ({', '.join(sorted(kinds))}); "
        "change what the transform returns",
        "types",
    )
