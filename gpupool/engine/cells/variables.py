"""The notebook's values on a rank, and the rank's values for the notebook. Runs on engines.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
    Sources,
    ValueInfo,
    Values,
)
from gpupool.engine.process import this_rank
from gpupool.engine.shell import restoring
from gpupool.engine.shell.cell_names import remember
from gpupool.engine.shell.shell import this_shell

_MAX_ATTRIBUTES = 2000
_GONE: Any = object()


class _Kept:
    """A parcel that has arrived: its value, if a name means it, and where its parts are now."""

    def __init__(self, packed: Packed) -> None:
        self._source = Source(packed)
        self.value: Any = _GONE
        self._parts: list[Callable[[], Any]] = []

    @property
    def is_made(self) -> bool:
        """Whether the value is there."""
        return self.value is not _GONE

    def load(self) -> None:
        """Make the value again."""
        self.value, parts = self._source.load(Unpickler)
        self._parts = [_weakly(part) for part in parts]

    def part(self, index: int) -> Any:
        """A part, the same one for all who ask while it is alive."""
        if index != WHOLE and self._parts:
            found = self._parts[index]()
            if found is not None:
                return found
        if index != WHOLE or not self.is_made:
            self.load()
        return self.value if index == WHOLE else self._parts[index]()


_kept: dict[int, _Kept] = {}
_bound: dict[str, int] = {}  # names that mean a parcel's value -> its number
_former: dict[str, Any] = {}  # while names are bound for a cell: what they meant before
_place: Place | None = None  # where this rank has followed the notebook to


def follow(place: Place) -> None:
    """Go where the notebook is, if it has moved."""
    global _place
    if place == _place:
        return
    _place = place
    os.umask(place.umask)
    if place.cwd and Path(place.cwd).is_dir():
        os.chdir(place.cwd)
        restoring.note_folder(place.cwd)
    find_modules(place.sys_path)


def find_modules(sys_path: Sequence[str]) -> None:
    """Find modules where the notebook finds them, and then where this rank does."""
    if [path for path in sys.path if path in sys_path] != list(sys_path):
        sys.path[:] = [*sys_path, *(path for path in sys.path if path not in sys_path)]


def receive(values: Values) -> dict[int, str]:
    """Receive parcels; number -> reason for those that cannot be read here.

    Meanwhile names mean what they will mean in the cell, so that methods that run find them.
    """
    remember(values.sources)
    follow(values.place)
    for number in _kept.keys() - set(values.wanted):
        del _kept[number]
    arrived = {number: _Kept(packed) for number, packed in values.parcels}
    _kept.update(arrived)
    if not arrived:
        return {}
    here = {name: number for name, number in values.numbers.items() if number in _kept}
    with _remembering({*here, *values.aliases}) as put_back:
        try:
            failed = _let_mean(here, values.aliases, arrived)
        finally:
            put_back()
    for number in failed:
        del _kept[number]
    return failed


def around(work: Callable[[], Reply[Value]], bindings: Bindings) -> Reply[Value]:
    """Call `work` with the notebook's values in place; its reply says what names mean then."""
    names, values = bindings.names, bindings.values
    if failed := receive(values):
        raise ParcelsLostError(_unreadable(failed))
    for module in bindings.modules:
        with contextlib.suppress(Exception):  # the cell fails, if it really needs it
            importlib.import_module(module)
    _repeat(bindings.imports)
    bind(values.numbers, values.aliases)
    before = identities(names)
    reply = work()
    release_rebound()
    return replace(reply, names=report(before, names))


def bind(numbers: Mapping[str, int], aliases: Aliases) -> None:
    """Let names mean the values of parcels, or what the rank has under another name."""
    if lost(numbers.values()):
        raise ParcelsLostError(
            f"rank {this_rank().rank} has lost values that the notebook had sent. Run the cell "
            "again: they are sent again."
        )
    with _remembering([*numbers, *aliases]):
        failed = _let_mean(numbers, aliases)
    _bound.update(numbers)
    if failed:
        raise ParcelsLostError(_unreadable(failed))


@contextlib.contextmanager
def _remembering(names: Iterable[str]) -> Iterator[Callable[[], None]]:
    """While entered, references to the rank's values mean what these names mean now: the notebook
    may swap two. Gives what lets the names mean that again."""
    space = this_shell().user_ns
    _former.update((name, space.get(name, _GONE)) for name in names)
    try:
        yield lambda: _set(_former)
    finally:
        _former.clear()


def _let_mean(
    numbers: Mapping[str, int], aliases: Aliases, others: Iterable[int] = ()
) -> dict[int, str]:
    """Let names mean the values of parcels, or what the rank has under another name.

    Args:
        others: parcels that are to be made too; they may have no name.

    Returns:
        Number -> reason for those that cannot be made.
    """
    _set({name: _find(other, path) for name, (other, path) in aliases.items()})
    # One that is not made yet is bound by its name no more, so what reads it fails, and is made
    # after it: methods of the notebook's classes may read names.
    _set({name: _kept[number].value for name, number in numbers.items()})
    waiting = list({*others, *numbers.values()})
    while True:
        failed = {}
        for number in sorted(waiting):
            try:
                if not _kept[number].is_made:
                    _kept[number].load()
            except Exception as error:
                failed[number] = f"{type(error).__name__}: {error}"
            else:
                _set({n: _kept[number].value for n, other in numbers.items() if other == number})
        if len(failed) in (0, len(waiting)):
            return failed
        waiting = list(failed)


def _unreadable(failed: Mapping[int, str]) -> str:
    return f"what the notebook sent cannot be read: {'; '.join(failed.values())}"


def _set(meanings: Mapping[str, Any]) -> None:
    """Bind names; where this rank has no value the name is not there: the cell fails, if it needs
    it."""
    space = this_shell().user_ns
    for name, value in meanings.items():
        if value is _GONE:
            space.pop(name, None)
        else:
            space[name] = value


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
    """Those of these parcels that are not here."""
    return sorted(set(numbers) - _kept.keys())


def release_rebound() -> None:
    """After a cell: release values that their names do not mean any more."""
    names = this_shell().user_ns
    for name, number in list(_bound.items()):
        kept = _kept.get(number)
        if kept is None or names.get(name, _GONE) is not kept.value:
            del _bound[name]
            if kept is not None and number not in _bound.values():
                kept.value = _GONE


def identities(names: Iterable[str]) -> dict[str, int]:
    """name -> which object it means, to be compared with `report` after a cell."""
    space = this_shell().user_ns
    return {name: id(space[name]) for name in names if name in space}


def report(before: Mapping[str, int], names: Iterable[str]) -> NamesReport:
    """What these names mean now, and which of them mean another object than before."""
    space = this_shell().user_ns
    found = {name: describe(space[name]) if name in space else None for name in names}
    changed = [name for name in found if before.get(name) != identities([name]).get(name)]
    return NamesReport(found, changed)


def describe(value: Any, text_chars: int = 0) -> ValueInfo:
    """What a value is; with a short repr, if `text_chars` says how long it may be."""
    shape = dtype = device = length = text = None
    if isinstance(value, (torch.Tensor, np.ndarray)):
        shape = tuple(int(n) for n in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        device = str(value.device) if isinstance(value, torch.Tensor) else None
    elif isinstance(value, (str, bytes, bytearray, list, tuple, dict, set, frozenset)):
        length = len(value)
    elif isinstance(found := _attribute(value, "shape"), tuple):
        shape = tuple(int(n) for n in found if isinstance(n, int))
    if text_chars:
        text = _text(value, text_chars)
        text = text if len(text) <= text_chars else text[: text_chars - 1] + "…"
    return ValueInfo(type(value).__name__, shape, dtype, device, length, text)


def look(name: str, path: Sequence[str], text_chars: int) -> ValueInfo | None:
    """`describe` of the rank's value of a name; None if it has none."""
    try:
        return describe(_rank_value(name, path), text_chars)
    except LookupError:
        return None


def attributes(name: str, path: Sequence[str]) -> list[str]:
    """The public attributes of the rank's value."""
    try:
        value = _rank_value(name, path)
    except LookupError:
        return []
    return [found for found in dir(value) if not found.startswith("_")][:_MAX_ATTRIBUTES]


def fetch(name: str, path: Sequence[str], out_path: str) -> Packed:
    """The rank's value as it travels; a large one is written to the file."""
    packer = Packer()
    packer.dump(_rank_value(name, path))
    if packer.num_bytes <= INLINE_BYTES:
        return travelling.to_wire(packer.stream(), packer.buffers, None)
    file = MemoryFile(os.open(out_path, os.O_RDWR | os.O_CLOEXEC), out_path)
    return travelling.to_wire(packer.stream(), packer.buffers, file)


def load(packed: Packed, sources: Sources) -> Any:
    """The value of a parcel that is used once."""
    remember(sources)
    return Source(packed).load(Unpickler)[0]


# ---- what a pickle from the notebook refers to -----------------------------------------------


def _part(number: int, index: int) -> Any:
    return _kept[number].part(index)


def _rank_value(name: str, path: Sequence[str], version: int = 0) -> Any:
    value = _former.get(name, this_shell().user_ns.get(name, _GONE))
    if value is _GONE:
        raise LookupError(f"rank {this_rank().rank} has no variable {name!r}")
    for attribute in path:
        if not hasattr(value, attribute):
            raise LookupError(f"{name} of rank {this_rank().rank} has no {'.'.join(path)}")
        value = getattr(value, attribute)
    return value


def _find(name: str, path: Sequence[str]) -> Any:
    try:
        return _rank_value(name, path)
    except LookupError:
        return _GONE


def _storage(buffer: Any, on_gpu: bool) -> Any:
    made = travelling.storage(buffer, on_gpu)
    device = torch.device(this_rank().device)
    return made.to(device=device) if on_gpu and device.type == "cuda" else made


class Unpickler(pickle.Unpickler):
    """Reads a pickle on a rank: what it refers to is the rank's, GPU tensors go to its GPU."""

    _OURS = {  # noqa: RUF012 - pickle has no class for it
        ("gpupool.core.wire.pickles", "part"): _part,
        ("gpupool.core.wire.pickles", "rank_value"): _rank_value,
        ("gpupool.core.wire.pickles", "storage"): _storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        """A function or class by name; ours for what means something on a rank only."""
        return self._OURS.get((module, name)) or super().find_class(module, name)


def _weakly(part: Any) -> Callable[[], Any]:
    """The part while it is alive; for good, if that cannot be known."""
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: part


def _text(value: Any, num_chars: int) -> str:
    try:
        return str(pretty(value, max_width=min(num_chars, 100), max_seq_length=20))
    except Exception as error:  # the user's __repr__; the value is there nevertheless
        return f"<its repr raised {type(error).__name__}: {error}>"


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # a property of the user's: it is not asked for here
        return None
