"""Values on their way between the notebook and the ranks. Runs anywhere.

A value is pickled; the data of arrays and tensors stands beside the pickle, so that it is neither
copied nor sent through the controller: large parcels are memory that both sides map. A file without
a name (memfd_create(2)) holds it, which the kernel frees with the last process that has it open:
nothing is left behind, whoever is killed, and no mount limits its size.

Functions and classes of the notebook travel by value, as cloudpickle does it. In values of cells
they look up the names they use where they run, in the namespace of the cells.
"""

from __future__ import annotations

import inspect
import io
import mmap
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any, NamedTuple

from gpupool.core.errors import GpuPoolError, PoolError, TrainingError
from gpupool.core.wire.reductions import Made, Pickler, dumps

INLINE_BYTES = 1 << 16  # smaller parcels travel in the message
WHOLE = -1  # the index of a parcel's value itself among its parts
_ALIGNMENT = 64  # bytes; what vector instructions and caches like
_PIECE_BYTES = 16 << 20
_NUM_WRITERS = 4
_OF_TORCHSCRIPT = "Tried to serialize object __torch__."  # how torch refuses one
_MAX_DEPTH = 6  # of what a value holds, where a part is looked for that cannot be pickled
_OF_RANKS = (
    "it refers to values that only the ranks have: put it again, made of the notebook's own."
)


class TooLargeError(Exception):
    """The value would pass the limit; `num_bytes` are known of it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def namespace() -> dict[str, Any]:
    """Where the names of cells live in this process: in the notebook and on a rank `__main__`."""
    return vars(sys.modules["__main__"])


def storage(buffer: Any, on_gpu: bool) -> Any:
    """A torch storage of these bytes, on the CPU. A rank puts it on its GPU if it was on one."""
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def typed_storage(untyped: Any, dtype: Any) -> Any:
    """What torch's tensors are rebuilt from."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


class DataPacker(Pickler):
    """Pickles one value; afterwards `stream()` is the pickle, `buffers` the data beside it, and
    `filenames` where its functions were compiled.

    A pickle, or data, of more than `max_bytes` is a `TooLargeError`, before it is copied.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._file = _BoundedFile(max_bytes)
        self.buffers = self._file.beside
        self.filenames: set[str] = set()
        # Not a method of ours: in a circle a packer would keep what it has packed for long.
        super().__init__(self._file, protocol=5, buffer_callback=self._file.leave_out)

    def stream(self) -> bytes:
        return self._file.getvalue()

    @property
    def num_bytes(self) -> int:
        return self._file.tell() + self._file.num_beside

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.storage.TypedStorage):
                return typed_storage, (obj._untyped_storage, obj.dtype)
            if isinstance(obj, torch.UntypedStorage):
                on_gpu = obj.device.type != "cpu"
                self._file.check(obj.nbytes())
                empty = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default is
                data = empty.set_(obj.cpu() if on_gpu else obj).numpy()
                return storage, (pickle.PickleBuffer(data), on_gpu)
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """cloudpickle's, for a function that travels by value, alone or in a class."""
        self.filenames.add(func.__code__.co_filename)
        return super()._dynamic_function_reduce(func)


class Packer(DataPacker):
    """The same for a value of a cell."""

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """cloudpickle's, for a function of the notebook with the rank's names for its globals."""
        make, arguments, (state, slots), *rest = super()._dynamic_function_reduce(func)
        if func.__globals__ is namespace():
            arguments = (arguments[0], _Namespace(), *arguments[2:])
            slots["__globals__"] = {}
        return make, arguments, (state, slots), *rest


class _Namespace:
    """In a pickle, the `namespace()` of the process that reads it."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return namespace, ()


class _BoundedFile(io.BytesIO):
    """A pickle, and the data beside it."""

    def __init__(self, max_bytes: int | None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.beside: list[memoryview] = []
        self.num_beside = 0

    def write(self, data: Any) -> int:
        self.check(self.tell() + len(data))
        return super().write(data)

    def leave_out(self, buffer: pickle.PickleBuffer) -> None:
        self.beside.append(buffer.raw())
        self.num_beside += self.beside[-1].nbytes
        self.check(self.num_beside)

    def check(self, num_bytes: int) -> None:
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise TooLargeError(num_bytes)


# ---- what crosses ----------------------------------------------------------------------------


class MemoryFile:
    """Anonymous memory with a `path` that processes of the same user can open, until `close`."""

    def __init__(self, descriptor: int | None = None, path: str = "") -> None:
        made = os.memfd_create("gpupool", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self.descriptor = made
        self.path = path or f"/proc/{os.getpid()}/fd/{made}"

    def close(self) -> None:
        """Release it; who has opened it keeps it. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    def write(
        self, parts: Sequence[memoryview], advance: Callable[[int], None] = lambda num_bytes: None
    ) -> list[Part]:
        """Put these into it, each aligned, in place of what it had before.

        `advance` is called with how many bytes more are there, in this thread.
        """
        written, position = [], 0
        for part in parts:
            start = -(-position // _ALIGNMENT) * _ALIGNMENT
            written.append(Part(part.nbytes, part.readonly, path=self.path, start=start))
            position = start + part.nbytes
        pieces = [
            (part[begin : begin + _PIECE_BYTES], there.start + begin)
            for part, there in zip(parts, written, strict=True)
            for begin in range(0, part.nbytes, _PIECE_BYTES)
        ]
        # The kernel takes as long to find and clear the pages as to copy: that scales with cores.
        with ThreadPoolExecutor(_NUM_WRITERS if position > _PIECE_BYTES else 1) as writers:
            for num_bytes in writers.map(lambda piece: _write(self.descriptor, *piece), pieces):
                advance(num_bytes)
        os.ftruncate(self.descriptor, position)
        return written


def _write(descriptor: int, piece: memoryview, position: int) -> int:
    num_bytes = piece.nbytes
    while piece.nbytes:
        written = os.pwrite(descriptor, piece, position)
        piece, position = piece[written:], position + written
    return num_bytes


class Part(NamedTuple):
    """Bytes on their way: `data`, or so many of the file at `path`, if there is one."""

    num_bytes: int
    readonly: bool
    data: bytes = b""
    path: str = ""
    start: int = 0


Packed = Sequence[Part]  # of a value: the data beside its pickle, and at the end the pickle


def inline(part: memoryview) -> Part:
    return Part(part.nbytes, part.readonly, bytes(part))


def to_wire(stream: bytes, buffers: Sequence[memoryview], file: MemoryFile | None) -> Packed:
    """A value as it crosses; its bytes are in `file`, or go along if there is none."""
    parts = [*buffers, memoryview(stream)]
    return [inline(part) for part in parts] if file is None else file.write(parts)


class Source:
    """A value that has arrived; `load` makes a new one of it each time."""

    def __init__(self, packed: Packed) -> None:
        self._parts = packed
        # Opened again, by their paths: then they live as long as we need them, whoever ends.
        self._files = {
            path: MemoryFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            for path in {part.path for part in packed if part.path}
        }

    def load(self, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
        """The value, with memory of its own: it may be written to."""
        mapped: dict[tuple[str, int], memoryview] = {}
        times = Counter[tuple[str, int]]()
        views = []
        for part in self._parts:
            view = memoryview(bytearray(part.data))
            if part.path and part.num_bytes:
                # What is equal may be in a file once, for two arrays of the value: each is mapped
                # by itself, as one may be written to.
                key = part.path, times[part.path, part.start]
                times[part.path, part.start] += 1
                if key not in mapped:
                    # Its pages are shared with all who map it, until one writes to its own.
                    file = self._files[part.path].descriptor
                    mapped[key] = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
                view = mapped[key][part.start : part.start + part.num_bytes]
            views.append(view.toreadonly() if part.readonly else view)
        *buffers, stream = views
        return unpickler(io.BytesIO(stream), buffers=buffers).load()


def pack(value: object, max_bytes: int | None = None) -> bytes:
    """A value as bytes, for a message; `unpack` is its inverse. GPU tensors arrive on the CPU.

    Raises TooLargeError, before a large tensor is copied, and whatever the value's class raises.
    """
    packer = Packer(max_bytes)
    packer.dump(value)
    return pickle.dumps(to_wire(packer.stream(), packer.buffers, None))


def unpack(data: bytes) -> Any:
    return Source(pickle.loads(data)).load()  # nosec B301 # made by `pack` in a process of the pool


def copy_of(model: Made) -> Made:
    """A copy of a network, made as networks travel; a TrainingError if it cannot.

    `copy.deepcopy` would refuse those whose hooks compute a weight, and forget the attributes of
    parameters.
    """
    try:
        copy: Made = pickle.loads(dumps(model))  # nosec B301 # made here
    except Exception as error:  # pickling runs arbitrary code of the objects' classes
        why = why_not(error, model, "model", dumps)
        raise TrainingError(f"model cannot be copied: {why}") from None
    return copy


def why_not(error: Exception, value: object, name: str, pack: Callable[[object], object]) -> str:
    """In words, why `pack` has raised `error` for `value`, and for which part of it."""
    if isinstance(error, GpuPoolError):
        return str(error)
    where = _culprit(value, name, pack, _MAX_DEPTH)
    if _OF_TORCHSCRIPT in str(error):
        return (
            f"{where} is a TorchScript network, which cannot be pickled. Give the module that it "
            "was made of; or torch.jit.save it to a file, and torch.jit.load that in a cell"
        )
    said = f"{type(error).__name__}: {error}"
    return said if where == name else f"{said} ({where})"


def _culprit(value: object, name: str, pack: Callable[[object], object], depth: int) -> str:
    """The innermost part for which `pack` raises, as one would write it."""
    for path, inner in _parts_of(value) if depth else ():
        try:
            pack(inner)
        except Exception:
            return _culprit(inner, name + path, pack, depth - 1)
    return name


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, FunctionType):
        uses = inspect.getclosurevars(value)
        yield from ((f", which closes over {name}", item) for name, item in uses.nonlocals.items())
        yield from ((f", which reads {name}", item) for name, item in uses.globals.items())
    else:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


# These two only stand in pickles: a rank puts its own in their place (`engine/cells/variables.py`).
def part(number: int, index: int) -> Any:
    """An object that came to the rank in an earlier parcel."""
    raise PoolError(_OF_RANKS)


def rank_value(name: str, path: tuple[str, ...], version: int) -> Any:
    """The rank's own value of a name, or an attribute of it."""
    raise PoolError(_OF_RANKS)
