"""Values on their way between the notebook and the ranks. Runs anywhere.

A value is pickled; the data of arrays and tensors is left out of the pickle and stands beside it,
so that it is neither copied nor sent through the controller: large parcels are memory that both
sides map. A file without a name (memfd_create(2)) holds it, which the kernel frees with the last
process that has it open: nothing is left behind, whoever is killed, and no mount limits its size.

Functions and classes of the notebook travel by value, as cloudpickle does it. In values of cells
they have no copy of the names they use: those are looked up where the function runs, in the
namespace of the cells.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from gpupool.core.wire.global_names import names_in_code
from gpupool.core.wire.reductions import NONE_NAMED, Named, Pickler, imported

INLINE_BYTES = 1 << 16  # smaller parcels travel in the message
WHOLE = -1  # the index of a parcel's value itself among its parts
_ALIGNMENT = 64  # bytes; what vector instructions and caches like
_PIECE_BYTES = 16 << 20
_NUM_WRITERS = 4
_MAX_DEPTH = 6  # of what a value holds, where a part is looked for that cannot be pickled


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


def sparse_tensor(parts: tuple[Any, Any], size: Any, requires_grad: bool, coalesced: bool) -> Any:
    """A sparse tensor. torch's own way keeps each in a list until the next `torch.load`."""
    import torch

    with torch.sparse.check_sparse_tensor_invariants(True):  # undecided, torch 2.11 warns
        made = torch.sparse_coo_tensor(*parts, size, is_coalesced=coalesced or None)
    return made.requires_grad_(requires_grad)


class DataPacker(Pickler):
    """Pickles one value; afterwards `stream()` is the pickle and `buffers` the data beside it.

    `filenames` are where the functions in it, and those of its classes, were compiled. What is
    `named` and cannot be pickled travels by its name.
    """

    def __init__(self, max_bytes: int | None = None, named: Named = NONE_NAMED) -> None:
        self._file = _BoundedFile(max_bytes)
        self._max_bytes, self._named = max_bytes, named
        self._storages: dict[int, Any] = {}  # address -> one object for all tensors that share it
        self.buffers = buffers = list[memoryview]()
        self._num_bytes = num_bytes = [0]
        self.filenames: set[str] = set()

        # Not a method: a packer in a circle would keep the value it has packed until a collection.
        def leave_out(buffer: pickle.PickleBuffer) -> None:
            raw = buffer.raw()
            num_bytes[0] += raw.nbytes
            _check(num_bytes[0], max_bytes)
            buffers.append(raw)

        super().__init__(self._file, protocol=5, buffer_callback=leave_out)

    def stream(self) -> bytes:
        """The pickle."""
        return self._file.getvalue()

    @property
    def num_bytes(self) -> int:
        """Pickle and data together."""
        return self._file.tell() + self._num_bytes[0]

    def reducer_override(self, obj: Any) -> Any:
        """How a part is pickled."""
        if id(obj) in self._named and not _can_pickle(obj):
            return imported, self._named[id(obj)]
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.Tensor) and obj.layout is torch.sparse_coo:
                parts = obj.detach()._indices(), obj.detach()._values()
                return sparse_tensor, (parts, obj.size(), obj.requires_grad, obj.is_coalesced())
            if isinstance(obj, torch.storage.TypedStorage):
                untyped = obj._untyped_storage
                same = self._storages.setdefault(untyped.data_ptr() or id(untyped), untyped)
                return typed_storage, (same, obj.dtype)
            if isinstance(obj, torch.UntypedStorage):
                return self._reduce_storage(torch, obj)
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """cloudpickle's, for a function that travels by value, alone or in a class."""
        self.filenames.add(func.__code__.co_filename)
        return super()._dynamic_function_reduce(func)

    def _reduce_storage(self, torch: Any, obj: Any) -> Any:
        on_gpu = obj.device.type != "cpu"
        _check(obj.nbytes(), self._max_bytes)
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default is
        data = empty.set_(obj.cpu() if on_gpu else obj).numpy()
        return storage, (pickle.PickleBuffer(data), on_gpu)


def _can_pickle(obj: object) -> bool:
    try:
        DataPacker().dump(obj)
    except Exception:  # code of its class
        return False
    return True


class Packer(DataPacker):
    """The same for a value of a cell."""

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """cloudpickle's, for a function of the notebook with the rank's names for its globals."""
        make, arguments, (state, slots), *rest = super()._dynamic_function_reduce(func)
        if func.__globals__ is namespace():
            arguments = (arguments[0], NAMESPACE, *arguments[2:])
            slots["__globals__"] = {}
        return make, arguments, (state, slots), *rest


class _Namespace:
    """Stands for `namespace()` in a pickle."""

    def __reduce__(self) -> Any:
        return namespace, ()


NAMESPACE = _Namespace()  # in a pickle, the namespace of the process that reads it


class _BoundedFile(io.BytesIO):
    def __init__(self, max_bytes: int | None) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        _check(self.tell() + len(data), self._max_bytes)
        return super().write(data)


def _check(num_bytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and num_bytes > max_bytes:
        raise TooLargeError(num_bytes)


# ---- what crosses ----------------------------------------------------------------------------


@dataclass(slots=True)
class MemoryFile:
    """Anonymous memory with a path that processes of the same user can open, until `close`."""

    descriptor: int = field(default_factory=lambda: os.memfd_create("gpupool", os.MFD_CLOEXEC))
    path: str = ""
    """Where others open it."""

    def __post_init__(self) -> None:
        self.path = self.path or f"/proc/{os.getpid()}/fd/{self.descriptor}"

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


@dataclass(frozen=True)
class Packed:
    """A packed value that crosses: the data beside its pickle, and at the end the pickle."""

    parts: Sequence[Part]


def inline(part: memoryview) -> Part:
    """Bytes that go along in the message."""
    return Part(part.nbytes, part.readonly, bytes(part))


def to_wire(stream: bytes, buffers: Sequence[memoryview], file: MemoryFile | None) -> Packed:
    """A value as it crosses; its bytes are in `file`, or go along if there is none."""
    parts = [*buffers, memoryview(stream)]
    return Packed([inline(part) for part in parts] if file is None else file.write(parts))


class Source:
    """A value that has arrived; `load` makes a new one of it each time.

    Args:
        is_reused: the file will have something else after this; so values are copied out of it.
    """

    def __init__(self, packed: Packed, *, is_reused: bool = False) -> None:
        self._parts, self._is_reused = packed.parts, is_reused
        # Opened again, by their paths: then they live as long as we need them, whoever ends.
        self._files = {
            path: MemoryFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            for path in {part.path for part in packed.parts if part.path}
        }

    def load(self, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
        """The value, with memory of its own: it may be written to."""
        read = _copied if self._is_reused else _mapped
        found: dict[tuple[str, int], memoryview] = {}
        times = Counter[tuple[str, int]]()
        views = []
        for part in self._parts:
            view = memoryview(bytearray(part.data))
            if part.path and part.num_bytes:
                # What is equal may be in a file once, for two arrays of the value: each is mapped
                # by itself, as one may be written to.
                key = part.path, times[part.path, part.start]
                times[part.path, part.start] += 1
                if key not in found:
                    found[key] = read(self._files[part.path].descriptor)
                view = found[key][part.start : part.start + part.num_bytes]
            views.append(view.toreadonly() if part.readonly else view)
        *buffers, stream = views
        return unpickler(io.BytesIO(stream), buffers=buffers).load()


def _mapped(descriptor: int) -> memoryview:
    """A file's content. Its pages are shared with all who map it, until one writes to its own."""
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))


def _copied(descriptor: int) -> memoryview:
    content = memoryview(bytearray(os.fstat(descriptor).st_size))
    position = 0
    while position < len(content):
        position += os.preadv(descriptor, [content[position:]], position)
    return content


def pack(value: object, max_bytes: int | None = None) -> bytes:
    """A value as bytes, for a message; `unpack` is its inverse. GPU tensors arrive on the CPU.

    Raises:
        TooLargeError: it takes more than `max_bytes`; known before a large tensor is copied.
        Exception: whatever the value's class raises when it cannot be pickled.
    """
    packer = Packer(max_bytes)
    packer.dump(value)
    if max_bytes is not None and packer.num_bytes > max_bytes:
        raise TooLargeError(packer.num_bytes)
    return pickle.dumps(to_wire(packer.stream(), packer.buffers, None))


def unpack(data: bytes) -> Any:
    """The value that `pack` was given."""
    return Source(pickle.loads(data)).load()  # nosec B301 # made by `pack` in a process of the pool


def why_not(
    error: Exception,
    value: object,
    name: str,
    pack: Callable[[object], object],
    opaque: tuple[type, ...] = (),
) -> str:
    """In words, why `pack` has raised `error` for `value`, and for which part of it.

    The part is looked for in all that `value` holds, but not in objects of types in `opaque`.
    """
    where = _culprit(value, name, pack, opaque, _MAX_DEPTH)
    said = f"{type(error).__name__}: {error}"
    return said if where == name else f"{said} ({where})"


def _culprit(
    value: object,
    name: str,
    pack: Callable[[object], object],
    opaque: tuple[type, ...],
    depth: int,
) -> str:
    """The innermost part for which `pack` raises, as one would write it."""
    for path, inner in _parts_of(value) if depth and not isinstance(value, opaque) else ():
        try:
            pack(inner)
        except Exception:
            return _culprit(inner, name + path, pack, opaque, depth - 1)
    return name


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    torch = sys.modules.get("torch")
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f", which closes over {name}", cell.cell_contents) for name, cell in cells)
        known = value.__globals__
        names = sorted(names_in_code(value.__code__)[0] & known.keys())
        yield from ((f", which reads {name}", known[name]) for name in names)
    elif torch is not None and isinstance(value, torch.nn.Module):
        yield from ((f".{name}", child) for name, child in value.named_children())
        plain = vars(value).items()
        yield from ((f".{key}", item) for key, item in plain if not key.startswith("_"))
    else:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


# These two only stand in pickles: a rank puts its own in their place (`engine/cells/variables.py`).
def part(number: int, index: int) -> Any:
    """An object that came to the rank in an earlier parcel."""
    raise NotImplementedError("only a rank has it")


def rank_value(name: str, path: tuple[str, ...], version: int) -> Any:
    """The rank's own value of a name, or an attribute of it."""
    raise NotImplementedError("only a rank has it")
