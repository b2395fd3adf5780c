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

import errno
import io
import mmap
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.wire.reductions import Pickler

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

    `owners` are the objects whose memory the buffers are, None where that is not known; `filenames`
    are where the functions in it, and those of its classes, were compiled.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._file = _BoundedFile(max_bytes)
        self._max_bytes = max_bytes
        self._storages: dict[int, Any] = {}  # address -> one object for all tensors that share it
        self.buffers = buffers = list[memoryview]()
        self.owners = owners = list[object]()
        self._owner = owner = list[object]()  # of the buffer that comes next
        self._num_bytes = num_bytes = [0]
        self.filenames: set[str] = set()

        # Not a method: a packer in a circle would keep the value it has packed until a collection.
        def leave_out(buffer: pickle.PickleBuffer) -> None:
            raw = buffer.raw()
            num_bytes[0] += raw.nbytes
            _check(num_bytes[0], max_bytes)
            buffers.append(raw)
            owners.append(owner.pop() if owner else None)

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
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.ndarray):
            _check(obj.nbytes, self._max_bytes)
            self._owner[:] = [_root(obj, numpy)]
        if torch is not None:
            if isinstance(obj, torch.Tensor):
                _check(obj.nbytes if obj.layout is torch.strided else 0, self._max_bytes)
                if obj.layout is torch.sparse_coo:
                    parts = obj.detach()._indices(), obj.detach()._values()
                    return sparse_tensor, (parts, obj.size(), obj.requires_grad, obj.is_coalesced())
            elif isinstance(obj, torch.storage.TypedStorage):
                untyped = obj._untyped_storage
                same = self._storages.setdefault(untyped.data_ptr() or id(untyped), untyped)
                return typed_storage, (same, obj.dtype)
            elif isinstance(obj, torch.UntypedStorage):
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
        self._owner[:] = [obj]
        return storage, (pickle.PickleBuffer(data), on_gpu)


def _root(array: Any, numpy: Any) -> object:
    """The array whose memory it is: of a slice, the whole."""
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


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

    @property
    def path(self) -> str:
        """Where others open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Release it; who has opened it keeps it. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class Packed:
    """A packed value that crosses: its pickle `stream` and the `data` beside it.

    Both are in the file at `path` instead, if there is one. `sizes` has of each part of the data
    how many bytes it has, and whether they are read-only.
    """

    stream: bytes
    sizes: Sequence[tuple[int, bool]]
    data: Sequence[bytes]
    path: str = ""


def to_wire(
    stream: bytes,
    buffers: Sequence[memoryview],
    file: MemoryFile | None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Packed:
    """A value as it crosses; its bytes are in `file`, or go along if there is none.

    `advance` is called with how many bytes more are in the file, in this thread.
    """
    sizes = [(buffer.nbytes, buffer.readonly) for buffer in buffers]
    if file is None:
        return Packed(stream, sizes, [bytes(buffer) for buffer in buffers])
    write_file(file.descriptor, buffers, stream, advance)
    return Packed(b"", sizes, [], file.path)


def write_file(
    descriptor: int,
    buffers: Sequence[memoryview],
    stream: bytes,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the data, each part aligned, and the pickle at the end; `advance` as in `to_wire`.

    What the file had before is gone.
    """
    parts = [*buffers, memoryview(stream)]
    starts = positions([part.nbytes for part in parts])
    num_bytes = starts[-1] + len(stream)
    pieces = [
        (part[start : start + _PIECE_BYTES], position + start)
        for part, position in zip(parts, starts, strict=True)
        for start in range(0, part.nbytes, _PIECE_BYTES)
    ]
    # The kernel takes as long to find and clear the pages as to copy: that scales with cores.
    num_writers = _NUM_WRITERS if num_bytes > _PIECE_BYTES else 1
    try:
        with ThreadPoolExecutor(num_writers) as writers:
            for written in writers.map(lambda piece: _write(descriptor, *piece), pieces):
                advance(written)
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise PoolError(
            f"{num_bytes:,} bytes go through memory that counts as a file, and "
            f"files of {most:,} bytes are allowed here: raise the limit with `ulimit -f` where the "
            "notebook is started",
            "file limit",
        ) from None


def positions(sizes: Iterable[int]) -> list[int]:
    """Where parts of these sizes, in bytes, begin in a file that has them one after the other."""
    found, position = [], 0
    for size in sizes:
        found.append(_aligned(position))
        position = found[-1] + size
    return found


def _write(descriptor: int, piece: memoryview, position: int) -> int:
    num_bytes = piece.nbytes
    while piece.nbytes:
        written = os.pwrite(descriptor, piece, position)
        piece, position = piece[written:], position + written
    return num_bytes


class Source:
    """A parcel that has arrived; `load` makes a new value of it each time.

    Args:
        is_reused: the file will have something else after this; so values are copied out of it.
    """

    def __init__(self, packed: Packed, *, is_reused: bool = False) -> None:
        self._packed, self._is_reused = packed, is_reused
        self._file: MemoryFile | None = None
        if packed.path:
            # opened again, by its path: then it lives as long as we need it, whoever ends
            self._file = MemoryFile(os.open(packed.path, os.O_RDONLY | os.O_CLOEXEC))

    def load(self, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
        """The value, with memory of its own: it may be written to."""
        if self._file is None:
            views = [memoryview(bytearray(data)) for data in self._packed.data]
            stream: Any = self._packed.stream
        else:
            views, stream = self._map(self._file.descriptor)
        sizes = self._packed.sizes
        buffers = [v.toreadonly() if r else v for v, (_, r) in zip(views, sizes, strict=True)]
        return unpickler(io.BytesIO(stream), buffers=buffers).load()

    def _map(self, descriptor: int) -> tuple[list[memoryview], memoryview]:
        mapped = (_copied if self._is_reused else map_file)(descriptor)
        sizes = [size for size, _ in self._packed.sizes]
        *starts, end = positions([*sizes, 0])
        views = [mapped[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return views, mapped[end:]


def map_file(descriptor: int) -> memoryview:
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
    return pickle.dumps(packed(value, max_bytes))


def packed(value: object, max_bytes: int | None = None) -> Packed:
    """A value as it crosses with a message; raises as `pack` does."""
    packer = Packer(max_bytes)
    packer.dump(value)
    if max_bytes is not None and packer.num_bytes > max_bytes:
        raise TooLargeError(packer.num_bytes)
    return to_wire(packer.stream(), packer.buffers, None)


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
    elif torch is not None and isinstance(value, torch.nn.Module):
        yield from ((f".{name}", child) for name, child in value.named_children())
        plain = vars(value).items()
        yield from ((f".{key}", item) for key, item in plain if not key.startswith("_"))
    else:
        yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


# These two only stand in pickles: a rank puts its own in their place (`engine/cells/variables.py`).
def part(number: int, index: int) -> Any:
    """An object that came to the rank in an earlier parcel."""
    raise NotImplementedError("only a rank has it")


def rank_value(name: str, path: tuple[str, ...], version: int) -> Any:
    """The rank's own value of a name, or an attribute of it."""
    raise NotImplementedError("only a rank has it")
