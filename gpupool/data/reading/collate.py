"""A batch from samples that come in any order, each written where it belongs. Runs on engines."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.samples import Skipped

_CPU = torch.device("cpu")
_TARGETS = ("label", "labels", "target", "targets")  # columns of a row


class Batch(NamedTuple):
    """Samples with the batch as first dimension; `inputs` and `targets` are None if `num` is 0.

    `skipped` are those that could not be read and are not among the `num` that are here.
    """

    inputs: Any
    targets: Any
    num: int
    skipped: tuple[Skipped, ...] = ()


class PendingBatch:
    """A batch under way: every row is put, skipped or fails, from any thread, in any order.

    `done` gets the `Batch` when its last row is there, or at once the first error. The inputs lie
    on `device`, the targets in CPU memory; only that of the CPU is pinned.
    """

    def __init__(
        self,
        indices: Iterable[int],
        *,
        pin: bool,
        skip: bool,
        device: torch.device = _CPU,
    ) -> None:
        self.indices = [int(index) for index in indices]
        self.done: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.has_failed = False
        num = len(self.indices)
        self._halves = _Half("inputs", num, pin, device), _Half("targets", num, pin, _CPU)
        self._skip = skip
        self._skipped: dict[int, Skipped] = {}
        self._left = num
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int:
        """The memory that one sample takes here; 0 while that is not known."""
        return sum(half.row_bytes for half in self._halves)

    def put(self, row: int, sample: Any) -> None:
        """Write a sample into its row."""
        for half, value in zip(self._halves, checked_pair(sample), strict=True):
            half.put(row, value)
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
        inputs, targets = (half.taken(rows) for half in self._halves)
        return Batch(inputs, targets, len(rows), skipped)


class _Half:
    """The inputs or the targets of a batch.

    Tensors are copied into one that is made for the whole batch when the first of them comes, in
    its memory format (decoders put the channels of a pixel side by side); anything else is collated
    at the end, as torch does it.
    """

    def __init__(self, name: str, num: int, pin: bool, device: torch.device) -> None:
        self._name, self._num, self._pin, self._device = name, num, pin, device
        self._stack: Tensor | None = None
        self._values: list[Any] = [None] * num
        self._other_types: set[str] = set()
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int:
        stack = self._stack
        return 0 if stack is None else stack[0].nbytes

    def put(self, row: int, value: Any) -> None:
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
            device=self._device,
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


def collate(samples: Iterable[Any]) -> tuple[Any, Any]:
    """The samples of a data set that is not ours, as torch collates them."""
    inputs, targets = zip(*map(checked_pair, samples), strict=True)
    return _collated("inputs", inputs), _collated("targets", targets)


def batch_of(read: Sequence[Any], *, pin: bool) -> Batch:
    """The batch of samples and, among them, `Skipped` ones, in the order in which they came."""
    samples = [sample for sample in read if not isinstance(sample, Skipped)]
    skipped = tuple(sample for sample in read if isinstance(sample, Skipped))
    if not samples:
        return Batch(None, None, 0, skipped)
    inputs, targets = collate(samples)
    if pin:
        inputs, targets = pinned(inputs), pinned(targets)
    return Batch(inputs, targets, len(samples), skipped)


def checked_pair(sample: Any) -> Any:
    """A sample as a pair (input, target); raises DataError if it is none.

    Of a dict with named columns, as a row of Hugging Face's data sets, the target is "label",
    "labels", "target" or "targets", and the input the other column, or a dict of the others.
    """
    if isinstance(sample, Mapping):
        return _pair_of_columns(sample)
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise DataError(
            f"a sample must be a pair (input, target), not {type(sample).__name__}; "
            "change what the dataset's __getitem__ returns",
            "no pair",
        )
    return sample


def _pair_of_columns(row: Mapping[str, Any]) -> tuple[Any, Any]:
    named = [name for name in _TARGETS if name in row]
    others = {name: value for name, value in row.items() if name not in named}
    if len(named) != 1 or not others:
        raise DataError(
            f"a sample is a dict of {', '.join(map(repr, row))}; with one of {', '.join(_TARGETS)} "
            "in it, that is the target; change what the dataset's __getitem__ returns",
            "no target",
        )
    return next(iter(others.values())) if len(others) == 1 else others, row[named[0]]


def _collated(name: str, values: Sequence[Any]) -> Any:
    shapes = {tuple(value.shape) for value in values if isinstance(value, (Tensor, np.ndarray))}
    # Found here, because the error of torch does not say what to do.
    if len(shapes) > 1:
        raise _differing(name, shapes)
    try:
        return default_collate(list(values))
    except (TypeError, RuntimeError, KeyError) as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DataError(
            f"no batch can be made of these {name} ({kinds}); change what the transform or the "
            f"data set returns: {error}",
            "no batch",
        ) from None


def _differing(name: str, shapes: set[tuple[int, ...]]) -> DataError:
    """The error for images of several sizes in one batch."""
    shown = [" x ".join(map(str, shape)) for shape in sorted(shapes)[:3]]
    more = ", ..." if len(shapes) > 3 else ""
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


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of a tree of dicts, lists and tuples, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors(part)


def pinned(value: Any) -> Any:
    """`value` with its tensors in page-locked memory, which the GPU copies while it computes."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: pinned(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pinned(item) for item in value]
    return value
