"""The notebook's values and modules on a rank, and its values for the notebook. Runs on engines.

A parcel stays here, as it came, for as long as the notebook has the value: a name that a cell has
bound to something else gets it again when the next cell asks for the notebook's value.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from IPython.lib.pretty import pretty

from gpupool.core.errors import ParcelsLostError
from gpupool.core.wire import pickles as travelling
from gpupool.core.wire.pickles import INLINE_BYTES, WHOLE, MemoryFile, Packed, Packer, Source
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.values import (
    Aliases,
    Bindings,
    NamesReport,
    Place,
    Reloaded,
    Sources,
    ValueInfo,
    Values,
)
from gpupool.engine.process import pool_folder, this_rank
from gpupool.engine.shell import remember, this_shell

_GONE: Any = object()


class _Kept:
    """A parcel that has arrived: its value, if a name means it, and its parts while they live."""

    def __init__(self, packed: Packed) -> None:
        self._source = Source(packed)
        self.value: Any = _GONE
        self.has_name = False
        self._parts: list[Callable[[], Any]] = []

    def make(self) -> Any:
        if self.value is _GONE:
            self.value, parts = self._source.load(_Unpickler)
            self._parts = [_weakly(part) for part in parts]
        return self.value

    def part(self, index: int) -> Any:
        """A part, the same one for all who ask while it is alive."""
        if index == WHOLE:
            return self.make()
        found = self._parts[index]() if self._parts else None
        if found is None:
            self.value = _GONE
            self.make()
            found = self._parts[index]()
        return found


_kept: dict[int, _Kept] = {}
_former: dict[str, Any] = {}  # while names are bound for a cell: what they meant before
_place: Place | None = None  # where this rank has followed the notebook to
_reloaded: dict[str, int] = {}  # module -> how often the notebook had loaded it again
_old_objects: dict[tuple[str, str], list[weakref.ref[Any]]] = {}


def follow(place: Place) -> None:
    """Go where the notebook is, if it has moved: cells may have gone elsewhere."""
    global _place
    if place != _place:
        _place = place
        os.umask(place.umask)
        with contextlib.suppress(OSError):  # another host may have no such folder
            os.chdir(place.cwd)
        find_modules(place.sys_path)


def find_modules(sys_path: Sequence[str]) -> None:
    """Find modules where the notebook finds them, and then where this rank does."""
    if [path for path in sys.path if path in sys_path] != list(sys_path):
        sys.path[:] = [*sys_path, *(path for path in sys.path if path not in sys_path)]


def load_again(reloaded: Reloaded) -> None:
    """Load the user's modules again that the notebook has loaded again; functions and objects that
    are here already get the new code, as with `%autoreload`."""
    new = [name for name, times in reloaded.times.items() if _reloaded.get(name) != times]
    _reloaded.update(reloaded.times)
    waiting: dict[str, Exception | None] = {name: None for name in new if name in sys.modules}
    if not waiting:
        return
    find_modules(reloaded.sys_path)
    from IPython.extensions.autoreload import superreload

    importlib.invalidate_caches()
    num_before = 0
    while len(waiting) != num_before:  # one may need something new of another one
        num_before = len(waiting)
        for name in list(waiting):
            try:
                superreload(sys.modules[name], old_objects=_old_objects)
                del waiting[name]
            except Exception as error:
                waiting[name] = error
    for name, problem in waiting.items():
        print(
            f"gpupool: rank {this_rank().rank} still has the module {name} as it was before, which "
            f"cannot be loaded again there: {type(problem).__name__}: {problem}",
            file=sys.stderr,
        )


def receive(values: Values) -> dict[int, str]:
    """Receive parcels; number -> reason for those that cannot be read here. Meanwhile names mean
    what they will mean in the cell, so that methods that run find them."""
    arrived, space = _take(values), this_shell().user_ns
    here = {name: number for name, number in values.numbers.items() if number in _kept}
    before = {name: space.get(name, _GONE) for name in (*here, *values.aliases)}
    try:
        return _let_mean(here, values.aliases, arrived)
    finally:
        _set(before)


def around(work: Callable[[], Reply[Value]], bindings: Bindings) -> Reply[Value]:
    """Call `work` with the notebook's values in place; its reply says what names mean then."""
    names, values = bindings.names, bindings.values
    arrived = _take(values)
    for module in bindings.modules:
        with contextlib.suppress(Exception):  # the cell fails, if it really needs it
            importlib.import_module(module)
    _repeat(bindings.imports)
    if lost(values.numbers.values()):
        raise ParcelsLostError(
            f"rank {this_rank().rank} has lost values that the notebook had sent. Run the cell "
            "again: they are sent again."
        )
    if failed := _let_mean(values.numbers, values.aliases, arrived):
        reasons = "; ".join(failed.values())
        raise ParcelsLostError(f"what the notebook sent cannot be read: {reasons}")
    before = _identities(names)
    reply = work()
    now, space = _identities(names), this_shell().user_ns
    found = {name: describe(space[name]) if name in now else None for name in names}
    changed = [name for name in names if before.get(name) != now.get(name)]
    # Values that no name means any more are released.
    meant = {id(value) for value in list(space.values())}
    for kept in _kept.values():
        if kept.has_name and id(kept.value) not in meant:
            kept.value = _GONE
    return replace(reply, names=NamesReport(found, changed))


def _take(values: Values) -> list[int]:
    """Take parcels, and drop those that are not wanted any more; gives the numbers of the new."""
    remember(values.sources)
    follow(values.place)
    for number in _kept.keys() - set(values.wanted):
        del _kept[number]
    _kept.update((number, _Kept(packed)) for number, packed in values.parcels)
    return [number for number, _ in values.parcels]


def _let_mean(
    numbers: Mapping[str, int], aliases: Aliases, others: Iterable[int]
) -> dict[int, str]:
    """Let names mean the values of parcels, or what the rank has under another name. The parcels
    `others` are made too; they may have no name.

    Meanwhile references to the rank's values mean what these names mean now: the notebook may swap
    two. Gives number -> reason for those that cannot be made, and are dropped.
    """
    space = this_shell().user_ns
    _former.update((name, space.get(name, _GONE)) for name in (*numbers, *aliases))
    try:
        _set({name: _find(other, path) for name, (other, path) in aliases.items()})
        # One that is not made yet is bound by its name no more, so what reads it fails, and is made
        # after it: methods of the notebook's classes may read names.
        _set({name: _kept[number].value for name, number in numbers.items()})
        for number in numbers.values():
            _kept[number].has_name = True
        waiting = {*others, *numbers.values()}
        while len(failed := _make(waiting, numbers)) not in (0, len(waiting)):
            waiting = {*failed}
        for number in failed:
            del _kept[number]
        return failed
    finally:
        _former.clear()


def _make(waiting: Iterable[int], numbers: Mapping[str, int]) -> dict[int, str]:
    failed = {}
    for number in sorted(waiting):
        try:
            value = _kept[number].make()
        except Exception as error:
            failed[number] = f"{type(error).__name__}: {error}"
        else:
            _set({name: value for name, other in numbers.items() if other == number})
    return failed


def _set(meanings: Mapping[str, Any]) -> None:
    """Bind names; one without a value is not there: the cell fails, if it needs it."""
    space = this_shell().user_ns
    for name, value in meanings.items():
        space[name] = value
        if value is _GONE:
            del space[name]


def _repeat(statements: Iterable[str]) -> None:
    """Make imports of earlier cells on a rank that is new; one that fails does not end the cell."""
    for line in statements:
        try:
            this_shell().ex(line)
        except Exception as error:
            print(
                f"gpupool: rank {this_rank().rank} is new, and `{line}` of an earlier cell "
                f"cannot be repeated there: {type(error).__name__}: {error}",
                file=sys.stderr,
            )


def lost(numbers: Iterable[int]) -> list[int]:
    return sorted(set(numbers) - _kept.keys())


def _identities(names: Iterable[str]) -> dict[str, int]:
    space = this_shell().user_ns
    return {name: id(space[name]) for name in names if name in space}


def describe(value: Any, text_chars: int = 0) -> ValueInfo:
    """What a value is; with a short repr, if `text_chars` says how long it may be."""
    shape = dtype = device = length = text = None
    if isinstance(value, (torch.Tensor, np.ndarray)):
        shape = tuple(int(n) for n in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        device = str(value.device) if isinstance(value, torch.Tensor) else None
    elif isinstance(value, (str, bytes, bytearray, list, tuple, dict, set, frozenset)):
        length = len(value)
    if text_chars:
        try:
            text = str(pretty(value, max_width=min(text_chars, 100), max_seq_length=20))
        except Exception as error:  # the user's __repr__; the value is there nevertheless
            text = f"<its repr raised {type(error).__name__}: {error}>"
        text = text if len(text) <= text_chars else text[: text_chars - 1] + "…"
    return ValueInfo(type(value).__name__, shape, dtype, device, length, text)


def look(name: str, path: Sequence[str], text_chars: int) -> ValueInfo | None:
    value = _find(name, path)
    return None if value is _GONE else describe(value, text_chars)


def attributes(name: str, path: Sequence[str]) -> list[str]:
    return [found for found in dir(_find(name, path)) if not found.startswith("_")]


def fetch(name: str, path: Sequence[str], out_path: str) -> Packed:
    """The rank's value as it travels; a large one is written to the file."""
    packer = Packer()
    packer.dump(_rank_value(name, path))
    file = out_file(out_path) if packer.num_bytes > INLINE_BYTES else None
    return travelling.to_wire(packer.stream(), packer.buffers, file)


def out_file(place: str) -> MemoryFile:
    """Where the client wants to have something: a path, or a name in the pool's folder."""
    path = pool_folder() / place  # a path stays as it is
    return MemoryFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), place)


def load(packed: Packed, sources: Sources) -> Any:
    """What the notebook has packed, to be used once."""
    remember(sources)
    return Source(packed).load(_Unpickler)


# ---- what a pickle from the notebook refers to -----------------------------------------------


def _part(number: int, index: int) -> Any:
    return _kept[number].part(index)


def _rank_value(name: str, path: Sequence[str], version: int = 0) -> Any:
    value = _find(name, path)
    if value is not _GONE:
        return value
    if _find(name, ()) is _GONE:
        raise LookupError(f"rank {this_rank().rank} has no variable {name!r}")
    raise LookupError(f"{name} of rank {this_rank().rank} has no {'.'.join(path)}")


def _find(name: str, path: Sequence[str]) -> Any:
    value = _former.get(name, this_shell().user_ns.get(name, _GONE))
    for attribute in path:
        value = getattr(value, attribute, _GONE)
    return value


def _storage(buffer: Any, on_gpu: bool) -> Any:
    made = travelling.storage(buffer, on_gpu)
    device = torch.device(this_rank().device)
    return made.to(device=device) if on_gpu and device.type == "cuda" else made


class _Unpickler(pickle.Unpickler):
    """Reads a pickle on a rank: what it refers to is the rank's, GPU tensors go to its GPU."""

    _OURS = {  # noqa: RUF012 - pickle has no class for it
        ("gpupool.core.wire.pickles", "part"): _part,
        ("gpupool.core.wire.pickles", "rank_value"): _rank_value,
        ("gpupool.core.wire.pickles", "storage"): _storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        return self._OURS.get((module, name)) or super().find_class(module, name)


def _weakly(part: Any) -> Callable[[], Any]:
    """The part while it is alive; for good, if that cannot be known."""
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: part
