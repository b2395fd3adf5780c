"""Handles of what the ranks have: a value on each of them, or one that all share. On the client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from typing import Any, TypeGuard

from gpupool.core.errors import CompositeError, PoolError, SpmdError
from gpupool.core.formatting import rank_count
from gpupool.core.progress import progress
from gpupool.core.wire.calls import Attributes, Call, Fetch, Look
from gpupool.core.wire.masking import redact
from gpupool.core.wire.pickles import MemoryFile, Packed, Source
from gpupool.core.wire.replies import Value
from gpupool.core.wire.values import NamesReport, ValueInfo
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.client import unheard_output
from gpupool.pool.engines.engines import of_rank
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.names import Losses, is_hidden

Key = tuple[str, tuple[str, ...], int]
"""Name, path of attributes, and version: what a Composite means on a rank."""

_DATA = {"int", "float", "complex", "bool", "NoneType"}  # what else has a shape or a length


class Composite:
    """One value per rank, which stays there until it is looked at.

    `x[rank]` fetches the rank's value, iteration and `x.gather()` those of all ranks in order;
    `len(x)` is the number of ranks. `x.info` maps each rank that has a value to its `ValueInfo`.
    `x.previous` is what the notebook's name meant before a cell assigned it; None if nothing.
    Other attributes are the attributes of the ranks' values, as a Composite: `model.weight.shape`.
    """

    def __init__(
        self,
        handles: Handles,
        name: str,
        version: int,
        *,
        path: tuple[str, ...] = (),
        previous: object = None,
    ) -> None:
        self._handles = handles
        self._name = name
        self._version = version
        self._path = path
        self.previous = previous

    @property
    def info(self) -> Mapping[int, ValueInfo]:
        """Rank -> type, shape and the like of its value; a rank without one is not there."""
        return self._handles.look(self)

    def gather(self) -> list[Any]:
        """The values of all ranks, in order; a PoolError if one has none, or it cannot travel."""
        return list(self)

    def __getitem__(self, rank: int) -> Any:
        num_ranks = len(self)
        # A slice or a name would be meant for the values: the sentence says how to index these.
        if not isinstance(rank, int) or not -num_ranks <= rank < num_ranks:
            raise IndexError(
                f"{self}[{rank!r}]: a Composite has one value per rank, 0 to {num_ranks - 1}. "
                f"To index the values themselves: `%spmd {self}[{rank!r}]`."
            )
        with progress(f"Fetching {self} of rank {rank % num_ranks}"):
            return self._handles.fetch(self, rank % num_ranks)

    def __len__(self) -> int:
        return self._handles.world_size

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))

    def __getattr__(self, name: str) -> Composite:
        if name.startswith("_"):  # protocols of Python and IPython: they mean the handle itself
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Asked now, not when it is used: a typo would else be an error far from its line.
        attribute = Composite(self._handles, self._name, self._version, path=(*self._path, name))
        try:
            found = attribute.info
        except PoolError as error:  # to `hasattr`, as variable viewers ask, that means no
            raise AttributeError(f"{self}.{name}: {error}") from None
        if not found:
            raise AttributeError(f"no rank's {self} has an attribute {name!r}")
        return attribute

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name != "previous":
            self._refuse()
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        # IPython asks this at each Tab; while the ranks are busy they are not waited for.
        return sorted({*super().__dir__(), *self._handles.attributes(self)})

    def _refuse(self, *_: object) -> Any:
        raise CompositeError(
            f"{self} is on the ranks: change it, call it, compare and compute with it there, in a "
            f"%%spmd cell; or use the value of one rank, {self}[0], or of all, {self}.gather()."
        )

    # Without `__bool__`, `if x:` would always be true, whatever the ranks have.
    __bool__ = __float__ = __int__ = __call__ = __setitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __matmul__ = _refuse

    # pickle would take `_handles` along, and with it the pool.
    def __reduce__(self) -> Any:
        raise PoolError(f"{self} is a handle of values on the ranks; {self}.gather() fetches them.")

    def __str__(self) -> str:
        return ".".join((self._name, *self._path))

    def __repr__(self) -> str:
        return f"Composite({self}, {rank_count(len(self))})"


class Constant:
    """A value that every rank has, made by `pool.put`: in a cell its name means the value itself.

    The ranks of a host share its memory until one of them writes to it. It is released when
    nothing in the notebook refers to it any more.
    """

    def __init__(self, variables: Any, number: int, kind: str) -> None:
        self._variables = variables  # `variables.Variables`, which imports this file
        self.number = number
        self._kind = kind

    def __reduce__(self) -> Any:
        raise PoolError(f"{self!r} means something on the ranks of its pool only.")

    def __repr__(self) -> str:
        return f"Constant({self._kind}, on {rank_count(self._variables.handles.world_size)})"


# No methods: those names belong to the attributes of the ranks' values.
def key_of(composite: Composite) -> Key:
    return composite._name, composite._path, composite._version


def handles_of(composite: Composite) -> Handles:
    return composite._handles


def value_of(value: Any) -> Any:
    """A value; of a Constant the value that the ranks have, in memory that is shared with them."""
    return value._variables.value_of(value) if isinstance(value, Constant) else value


class Handles:
    """The composites of one pool, and what is known of the names that they stand for."""

    def __init__(self, all_ranks: Ranks) -> None:
        self._all_ranks = all_ranks
        self.losses = Losses()
        # name -> how often it has been bound on the ranks, and to what, if the notebook knows that
        self._versions: dict[str, tuple[int, object]] = {}
        # what code of ranks is called by -> names that it may read
        self.reads = defaultdict[str, frozenset[str]](frozenset)

    @property
    def world_size(self) -> int:
        return self._all_ranks.world_size

    def version(self, name: str) -> int:
        """That of what the ranks have under a name now: handles of an earlier one are of no use."""
        return self._versions.get(name, (0, None))[0]

    def bind(self, name: str, meaning: object = None) -> None:
        """The name is bound, by a cell, or for one to this `meaning`: with the same again handles
        of it stay good."""
        number, known = self._versions.get(name, (0, None))
        self._versions[name] = number + (meaning is None or meaning != known), meaning

    def handle(self, name: str, previous: object = None) -> Composite:
        return Composite(self, name, self.version(name), previous=previous)

    def get(self, name: str) -> Composite:
        """What the ranks have under a name; a PoolError if none has anything."""
        composite = self.handle(name)
        # By `exec` or `%run`, ranks may have names that no cell was seen to bind: ask them.
        if not (infos := composite.info):
            hint = self.losses.sentence(name)
            raise PoolError(f"no rank has a variable {name!r}. {hint}".rstrip())
        self.losses.note(name, infos)
        return composite

    # ---- what names of the notebook mean -----------------------------------------------------

    def take_back(
        self,
        names: dict[str, Any],
        assigned: Iterable[str],
        deleted: Iterable[str],
        reports: Mapping[int, NamesReport],
        succeeded: bool,
        expected: Mapping[str, Composite],
        later: Collection[str],
    ) -> None:
        """Bind the notebook's `names` to what a cell has left on the ranks.

        `assigned` and `deleted` are names that it binds and unbinds. Of a failed cell only names
        count that have got another value. `expected` is what `expect` gave: the notebook may call
        something else by these names now. `later` is what functions and classes that it has bound
        may read.
        """
        for name in sorted({*expected, *(name for r in reports.values() for name in r.info)}):
            infos, changed = _of_name(name, reports)
            found = [info for info in infos.values() if info is not None]
            # `x = x` changes nothing, and yet the cell has decided what x is from now on.
            is_bound = bool(found) and (changed or (succeeded and name in assigned))
            handle: Composite | None = expected.get(name)
            bound: object = names.get(name)
            if is_bound and not all(map(_is_data, found)):
                self.reads[name] |= {*later}
            if is_bound and handle is None:
                names[name] = self._new_composite(name, bound)
            elif not is_bound and name not in deleted:
                # The user may have bound the name while the cell ran in the background.
                if handle is not None and bound is handle and handle.previous is not None:
                    names[name] = handle.previous
            elif not found and len(infos) == self.world_size and _is_handle(bound, name):
                del names[name]
                self.losses.end(name)
            self.losses.note(name, infos)

    def expect(self, names: dict[str, Any], assigned: Iterable[str]) -> dict[str, Composite]:
        """Bind the names that a cell is going to bind, which runs in the background."""
        expected = {}
        for name in filterfalse(is_hidden, assigned):
            names[name] = expected[name] = self._new_composite(name, names.get(name))
        return expected

    def synced(
        self, names: dict[str, Any], chosen: Iterable[str], reports: Mapping[int, NamesReport]
    ) -> None:
        """Some ranks have copies of another one's state: what the notebook called its own becomes a
        handle, where a rank has a new object by its name."""
        for name in chosen:
            infos, changed = _of_name(name, reports)
            if name in names and changed and not _is_handle(names[name], name):
                names[name] = self._new_composite(name, names[name])
            self.losses.note(name, infos)

    def _new_composite(self, name: str, replaced: object) -> Composite:
        self.bind(name)
        self.losses.end(name)
        # One back only: a chain of handles would keep every value the name has ever had.
        return self.handle(name, replaced.previous if _is_handle(replaced, name) else replaced)

    # ---- what is asked of ranks --------------------------------------------------------------

    def current(self, composite: Composite) -> Key:
        """What a Composite of this pool means; a PoolError if its values are gone."""
        key = name, _, version = key_of(composite)
        if handles_of(composite) is not self:
            raise PoolError(f"{composite} is of another pool, whose ranks had the values.")
        if version != self.version(name):
            raise PoolError(
                f"this is a handle of an earlier {name}: a later cell has assigned the name again, "
                f"and pool[{name!r}] is what the ranks have now."
            )
        return key

    def look(self, composite: Composite, text_chars: int = 0) -> dict[int, ValueInfo]:
        """Rank -> what its value is; a rank without one is not there."""
        found = self.ask(Look(*self.current(composite)[:2], text_chars))
        hidden = self._all_ranks.secrets
        return {
            rank: replace(info, text=redact(info.text, hidden) if info.text else None)
            for rank, info in found.items()
            if info is not None
        }

    def attributes(self, composite: Composite) -> list[str]:
        if self._all_ranks.state != "idle":  # who completes a name does not wait
            return []
        found = self.ask(Attributes(*self.current(composite)[:2]))
        return sorted({attribute for listed in found.values() for attribute in listed})

    def fetch(self, composite: Composite, rank: int) -> Any:
        file = MemoryFile()
        packed = self.fetch_packed(rank, file, partial(Fetch, *self.current(composite)[:2]))
        try:
            return Source(packed).load()
        except Exception as error:  # DDP wants a process group, for one
            raise PoolError(
                f"{composite} of rank {rank} cannot be made in the notebook, an attribute of it "
                f"perhaps. {type(error).__name__}: {error}",
                ranks=[rank],
            ) from error

    def fetch_packed(
        self, rank: int, file: MemoryFile, call: Callable[[str], Call[Packed]]
    ) -> Packed:
        """What a rank gives that is called; it writes to `file` what is large."""
        carrier = self._all_ranks.carrier
        return carrier.fetched(rank, file, lambda path: self.ask(call(path), [rank])[rank])

    def ask(self, call: Call[Value], ranks: Sequence[int] | None = None) -> dict[int, Value]:
        """Make a quick call about names; a PoolError if a rank is busy, or has no such value."""
        if self._all_ranks.state == "busy":  # it would have to wait for the end of a cell
            raise PoolError("the ranks are busy: ask again when the running cell has ended.")
        chosen = self._all_ranks.engines.alive_ranks() if ranks is None else ranks
        try:
            return Execution(self._all_ranks, dict.fromkeys(chosen, call), unheard_output).result()
        except SpmdError as error:
            first = error.first
            raise PoolError(of_rank(first.rank, first.evalue), ranks=[first.rank]) from None


def _is_handle(bound: object, name: str) -> TypeGuard[Composite]:
    """Whether this is what the ranks have by that very name."""
    return isinstance(bound, Composite) and key_of(bound)[:2] == (name, ())


def _of_name(
    name: str, reports: Mapping[int, NamesReport]
) -> tuple[dict[int, ValueInfo | None], bool]:
    """What the ranks that report mean by a name, and whether it is another value on one."""
    infos = {rank: report.info.get(name) for rank, report in reports.items()}
    return infos, any(name in report.changed for report in reports.values())


def _is_data(info: ValueInfo) -> bool:
    """Whether no code is in a value: it reads nothing later."""
    return info.shape is not None or info.length is not None or info.type in _DATA
