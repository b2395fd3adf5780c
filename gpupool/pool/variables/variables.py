"""Variables of notebook and ranks: what travels, and handles of what stays. On the client.

The notebook's binding decides. A name that a cell reads and the notebook has is sent, unless the
ranks have the value already; a `Composite` means what each rank has. A value is on every rank that
takes part before any of them runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse
from types import ModuleType
from typing import Any

from gpupool.core.errors import PoolError, TransferError
from gpupool.core.wire.calls import Bind, RunFunction
from gpupool.core.wire.global_names import RANK_NAMES
from gpupool.core.wire.output import OnOutput
from gpupool.core.wire.pickles import namespace
from gpupool.core.wire.replies import CodeReply
from gpupool.core.wire.values import Bindings, NamesReport, ValueInfo
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.notices import OnNotice
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.buffers import Buffers
from gpupool.pool.variables.composite import Composite, Constant, key_of, pool_variables
from gpupool.pool.variables.delivery import Delivery
from gpupool.pool.variables.losses import Losses, Statements
from gpupool.pool.variables.names import Made, Versions, is_hidden, is_of_shell, require_name
from gpupool.pool.variables.parcels import Parcels, Shipment
from gpupool.pool.variables.remote_values import RemoteValues
from gpupool.pool.variables.value_pickler import reason

_NO_HANDLES: Mapping[str, Composite] = {}
_NO_STATEMENTS: Statements = {}
_NO_READS: Mapping[str, frozenset[str]] = {}
_NOTHING = "", ()  # no rank has anything by this name
_DATA = {"int", "float", "complex", "bool", "NoneType"}  # what else has a shape or a length


class Variables:
    """The variables of one pool, as `pool[...]` and cells see them."""

    def __init__(self, all_ranks: Ranks) -> None:
        self._all_ranks = all_ranks
        # Reentrant: `begin_call` holds it when it calls `bindings`.
        self._lock = threading.RLock()
        self.buffers = Buffers()
        self._parcels = Parcels(
            self.buffers, self._key_of, lambda constant: pool_variables(constant) is self
        )
        self._delivery = Delivery(all_ranks, self._parcels)
        self._unwanted: list[int] = []  # constants that the notebook has released
        self._new_ranks: list[int] = []  # of which the delivery does not know yet
        self._versions = Versions()
        self.losses = Losses()
        self.remote = RemoteValues(all_ranks, self.losses)
        self.num_changes = 0  # of what ranks have, by other ways than a cell
        self._rank_reads: dict[str, frozenset[str]] = {}  # functions of ranks -> names they read

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._all_ranks.world_size

    # ---- into a cell ---------------------------------------------------------------------

    def ship(
        self,
        reads: Iterable[str],
        names: dict[str, Any],
        ranks: Sequence[int],
        *,
        optional: Collection[str] = (),
        attributes: Iterable[str] = (),
        made: Iterable[Made] = (),
        waits: bool = True,
    ) -> Shipment:
        """Bring to `ranks` what they need of the notebook's `names` to run code that reads `reads`.

        Args:
            optional: names that the code may have bound before it reads them: what cannot be sent
                of these is left out, and means nothing on the ranks.
            attributes: what the code mentions behind a dot: submodules may be meant.
            made: what it binds, and what it makes that of.
            waits: for ranks that are in use; else the values go with the code when its turn comes.

        Raises:
            TransferError: a value cannot be sent, or be read on a rank; nothing is bound then.
        """
        self._all_ranks.wait_until_usable()
        with self._lock:
            self._begin(names)
            shipment = self._gather(reads, names, attributes, optional)
            shipment.later = self._read_later(made, shipment)
            # A call of its own would wait for its turn, and hold the notebook meanwhile.
            goes_along = not waits and self._all_ranks.turns.are_in_use(ranks)
            self._delivery.send(shipment, ranks, first=False if goes_along else None)
            self._note(shipment, names)
            self.losses.found(shipment.numbers, ranks)
        return shipment

    def bindings(
        self,
        shipment: Shipment,
        ranks: Sequence[int],
        names: Iterable[str],
        statements: Statements = _NO_STATEMENTS,
    ) -> dict[int, Bindings]:
        """rank -> what names mean there for a call.

        Args:
            names: what the code binds, to be reported on.
            statements: its imports.
        """
        place = notebook_place()
        bound = sorted(filterfalse(is_hidden, {*names, *shipment.bound}))
        with self._lock:
            self._note_new_ranks()
            return {
                rank: Bindings(
                    self._delivery.values(shipment.along.get(rank, ()), shipment, place),
                    modules=sorted(shipment.modules),
                    imports=self.losses.begin(rank, statements, bound),
                    names=bound,
                )
                for rank in ranks
            }

    def forget_rank(self, rank: int, how: str) -> None:
        """This rank is new: it has nothing. `how` the old one ended: "was restarted".

        Takes no lock: who holds it may be waiting for this rank.
        """
        self._new_ranks.append(rank)
        self.losses.lose(rank, how)
        self.num_changes += 1

    def _note_new_ranks(self) -> None:
        """Forget what ranks had that are new; with the lock held."""
        while self._new_ranks:
            self._delivery.forget_ranks([self._new_ranks.pop()])

    def not_there(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank does not have these parcels, though they were on the way to it."""
        self._delivery.not_there(rank, numbers)

    # ---- out of a cell -------------------------------------------------------------------

    def take_back(
        self,
        names: dict[str, Any],
        assigned: Iterable[str],
        deleted: Iterable[str],
        reports: Mapping[int, NamesReport],
        succeeded: bool,
        expected: Mapping[str, Composite] = _NO_HANDLES,
        later: Mapping[str, frozenset[str]] = _NO_READS,
    ) -> None:
        """Bind the notebook's names to what a cell has left on the ranks.

        Args:
            names: the notebook's namespace.
            assigned, deleted: names that the cell binds and unbinds.
            reports: rank -> its answer, from those that gave one.
            succeeded: of a failed cell, only names count that have got another value.
            expected: what `expect` gave: the notebook may call something else by these names now.
            later: what the functions and classes read that the cell has bound.
        """
        reported = {name for report in reports.values() for name in report.info}
        for name in sorted(reported.union(expected)):
            changed = any(name in report.changed for report in reports.values())
            infos = {rank: report.info.get(name) for rank, report in reports.items()}
            is_there = any(info is not None for info in infos.values())
            # `x = x` changes nothing, and yet the cell has decided what x is from now on.
            is_bound = is_there and (changed or (succeeded and name in assigned))
            is_newest = name not in expected or self._is_current(expected[name])
            if is_bound and is_newest:
                is_code = any(info is not None and not _is_data(info) for info in infos.values())
                self._rank_reads[name] = later.get(name, frozenset()) if is_code else frozenset()
            if name in expected and (is_bound or name not in deleted):
                self._fulfil(expected[name], names, is_bound)
            elif is_bound:
                names[name] = self._new_composite(name, infos, names.get(name))
            elif not is_there and name in deleted and self._is_gone(name, names.get(name), infos):
                del names[name]
                self.losses.end(name)
        for name in reported:
            self.losses.note(name, {rank: r.info.get(name) for rank, r in reports.items()})

    def expect(self, names: dict[str, Any], assigned: Iterable[str]) -> dict[str, Composite]:
        """Bind the names that a cell is going to bind, which runs in the background."""
        expected = {}
        for name in filterfalse(is_hidden, assigned):
            names[name] = expected[name] = self._new_composite(name, None, names.get(name))
        return expected

    def synced(
        self,
        names: dict[str, Any],
        chosen: Iterable[str],
        reports: Mapping[int, NamesReport],
    ) -> None:
        """Some ranks have copies of another one's state. Handles still mean what the ranks have;
        what the notebook called its own becomes one, where a rank has a new object by its name."""
        with self._lock:
            self.num_changes += 1
            for name in chosen:
                infos = {rank: report.info.get(name) for rank, report in reports.items()}
                bound = names.get(name)
                is_handle = isinstance(bound, Composite) and key_of(bound)[:2] == (name, ())
                changed = any(name in report.changed for report in reports.values())
                if name in names and changed and not is_handle:
                    names[name] = self._new_composite(name, infos, bound)
                self.losses.note(name, infos)

    # ---- one by one ----------------------------------------------------------------------

    def get(self, name: str) -> Composite:
        """What the ranks have under a name.

        Raises:
            PoolError: none has anything.
        """
        composite = Composite(self, name, self._versions.of(name))
        # By `exec` or `%run`, ranks may have names that no cell was seen to bind: ask them.
        if not composite.info:
            hint = self.losses.sentence(name)
            raise PoolError(f"no rank has a variable {name!r}{f': {hint}' if hint else '.'}")
        self.losses.note(
            name, {rank: composite.info.get(rank) for rank in self._all_ranks.engines.alive_ranks()}
        )
        return composite

    def set(self, name: str, value: object) -> None:
        """Put a value on every rank, under a name.

        Raises:
            PoolError: it is no name for a value on the ranks.
            TransferError: the value cannot be sent.
        """
        require_name(name)
        ranks = self._all_ranks.select(None)  # also those that are just being replaced
        # A copy of the namespace: the notebook's own name keeps its meaning.
        shipment = self.ship([name], {**namespace(), name: value}, ranks)
        bindings = self.bindings(shipment, ranks, [])
        calls = {rank: Bind(bindings=bindings[rank]) for rank in ranks}
        Execution(self._all_ranks, calls, unheard_output).result()

    def put(self, value: object) -> Constant:
        """Bring a value of any size to every rank; in a cell a name for it means the value.

        Raises:
            TransferError: it cannot be sent.
        """
        self._all_ranks.wait_until_usable()
        names, ranks = namespace(), self._all_ranks.select(None)
        with self._lock:
            self._begin(names)
            try:
                parcel = self._parcels.constant(value)
            except Exception as error:
                raise TransferError({"the value": reason(error, "it", value)}) from None
            try:
                shipment = self._gather(self._parcels.names_in(parcel.number)[0], names)
                shipment.numbers["the value"] = parcel.number
                self._delivery.send(shipment, ranks, first=True)
            except BaseException:  # nobody will ever ask for it
                self._parcels.drop(parcel.number)
                raise
        return Constant(self, parcel.number, type(value).__name__)

    def bring(self, numbers: Iterable[int], ranks: Sequence[int]) -> None:
        """Bring constants to ranks that lack them, and what their functions read; as `put` does."""
        with self._lock:
            self._begin(names := namespace())
            reads = {name for n in numbers for name in self._parcels.names_in(n)[0]}
            shipment = self._gather(reads, names)
            self._delivery.send(shipment, ranks, numbers, first=True)
            self._note(shipment, names)
            calls = {r: Bind(bindings=b) for r, b in self.bindings(shipment, ranks, []).items()}
        Execution(self._all_ranks, calls, unheard_output).result()

    def value_of(self, constant: Constant) -> Any:
        """What a constant is, mapped from where the ranks map it: always the same object.

        Raises:
            PoolError: it is not one of this pool's, or refers to what the notebook has released.
        """
        with self._lock:
            number = self._parcels.parcel_of(constant)
            assert number is not None
            return self._parcels.open(number)

    def parcel_of(self, value: object) -> int | None:
        """The parcel of a constant, or of what `value_of` has given for one; None of any other.

        Raises:
            PoolError: it is a constant of another pool.
        """
        return self._parcels.parcel_of(value)

    def release(self, number: int) -> None:
        """Nobody refers to a constant any more. Takes no lock: any thread may be collecting."""
        self._unwanted.append(number)

    def look(self, composite: Composite, text_chars: int = 0) -> dict[int, ValueInfo]:
        """Rank -> what its value is; without the ranks that have none."""
        return self.remote.look(*self._current(composite), text_chars)

    def attributes(self, composite: Composite) -> list[str]:
        """The public attributes of the ranks' values; none while the ranks are busy."""
        return self.remote.attributes(*self._current(composite))

    def fetch(self, composite: Composite, rank: int) -> Any:
        """The value of one rank.

        Raises:
            PoolError: it has none, or it cannot travel.
        """
        return self.remote.fetch(*self._current(composite), rank)

    def begin_call(
        self,
        call: tuple[Any, ...],
        ranks: Sequence[int],
        on_output: OnOutput,
        timeout_s: float | None,
        on_notice: OnNotice | None,
    ) -> Execution[CodeReply]:
        """Start a (function, args, kwargs) on ranks; names that it reads travel too.

        Raises:
            TransferError: a part of it cannot be sent.
        """
        self._all_ranks.wait_until_usable()
        with self._lock:
            self._begin(names := namespace())
            # Not kept by the others: the arguments of the next call are other ones.
            parcel = self._parcels.once(call)
            shipment = self._gather(parcel.names_read, names)
            self._delivery.send(shipment, ranks, parcel.needs)
            self._note(shipment, names)
            bindings = self.bindings(shipment, ranks, [])
        calls = {
            rank: RunFunction(parcel.wire, parcel.sources, bindings=bindings[rank])
            for rank in ranks
        }
        execution = Execution(self._all_ranks, calls, on_output, timeout_s, on_notice)
        execution.keeps = parcel, shipment  # until the ranks have read them
        return execution

    # ---- inside --------------------------------------------------------------------------

    def _begin(self, names: Mapping[str, object]) -> None:
        self._note_new_ranks()
        # `append` and `pop` of a list are atomic, so `release` needs no lock.
        while self._unwanted:
            self._parcels.drop(self._unwanted.pop())
        self._parcels.begin(names)

    def _gather(
        self,
        reads: Iterable[str],
        names: Mapping[str, object],
        attributes: Iterable[str] = (),
        optional: Collection[str] = (),
    ) -> Shipment:
        """Follow the names that are read, and those that functions among them read.

        Raises:
            TransferError: a value cannot be sent.
        """
        shipment = Shipment()
        # A queue: functions that are read add the names that they read, in any number of turns.
        queue, seen = sorted(reads), set[str]()
        while queue:
            name = queue.pop(0)
            if name in seen or name not in names or is_hidden(name):
                continue
            seen.add(name)
            value = names[name]
            if is_of_shell(name, value):
                continue
            # `torch.optim` in a cell needs the submodule, which `import torch` alone may not load.
            if isinstance(value, ModuleType):
                shipment.modules.update(_submodules(value.__name__, attributes))
            if name in RANK_NAMES and not isinstance(value, Composite):
                if not isinstance(value, ModuleType):
                    shipment.covered.add(name)
            elif isinstance(value, Composite):
                self._alias(shipment, name, value)
                # A function that lives on the ranks may read names that only the notebook has.
                queue += self._rank_reads.get(key_of(value)[0], ())
            elif isinstance(value, Constant):
                try:
                    number = self._parcels.parcel_of(value)
                except PoolError as error:
                    shipment.problems[name] = str(error)
                else:
                    assert number is not None
                    self._follow(name, number, shipment, queue)
            else:
                try:
                    number = self._parcels.parcel(name, value).number
                except Exception as error:  # all names are tried: one message lists the problems
                    shipment.problems[name] = reason(error, name, value)
                else:
                    self._follow(name, number, shipment, queue)
        for name in shipment.problems.keys() & set(optional):
            shipment.left_out[name] = shipment.problems.pop(name)
            shipment.aliases[name] = _NOTHING  # else it would mean what it meant there before
        if shipment.problems:
            raise TransferError(shipment.problems)
        return shipment

    def _read_later(self, made: Iterable[Made], shipment: Shipment) -> dict[str, frozenset[str]]:
        """What the functions and classes read that code binds; what is made of one reads that."""
        later: dict[str, frozenset[str]] = {}
        for one in made:
            reads = set(one.inside)
            for name in one.reads:
                if name in shipment.numbers and name not in later:
                    reads |= self._parcels.names_in(shipment.numbers[name])[0]
                reads |= later.get(name, self._rank_reads.get(name, frozenset()))
            for name in one.names:
                later[name] = later.get(name, frozenset()) | reads
        return later

    def _follow(self, name: str, number: int, shipment: Shipment, queue: list[str]) -> None:
        shipment.numbers[name] = number
        reads, binds = self._parcels.names_in(number)
        queue += sorted(reads)
        shipment.bound |= binds

    def _alias(self, shipment: Shipment, name: str, value: Composite) -> None:
        try:
            other, path = self._current(value)
        except PoolError as error:
            shipment.problems[name] = str(error)
            return
        if (other, path) != (name, ()):
            shipment.aliases[name] = other, path

    def _note(self, shipment: Shipment, names: dict[str, Any]) -> None:
        """Names are going to be bound on the ranks. A handle of what one of them has meant is of
        no use then, unless the same cell gives that another name: `a, b = b, a`."""
        self._versions.shipped(shipment)
        for name in shipment.aliases.keys() - shipment.left_out.keys():
            other, _, version = key_of(names[name])
            if version != self._versions.of(other):
                now = self._versions.of(name)
                names[name] = Composite(self, name, now, previous=names[name].previous)

    def _new_composite(
        self, name: str, infos: Mapping[int, ValueInfo | None] | None, replaced: object
    ) -> Composite:
        version = self._versions.assigned(name)
        self.losses.end(name)
        previous = replaced
        # One back only: a chain of handles would keep every value the name has ever had.
        if isinstance(replaced, Composite) and key_of(replaced)[:2] == (name, ()):
            previous = replaced.previous
        info = None
        # Only if all ranks took part: a handle's info is that of all ranks.
        if infos is not None and len(infos) == self.world_size:  # else it is asked for when needed
            info = {rank: one for rank, one in infos.items() if one is not None}
        return Composite(self, name, version, info, previous=previous)

    def _fulfil(
        self,
        handle: Composite,
        names: dict[str, Any],
        is_bound: bool,
    ) -> None:
        """A cell has bound what it was expected to, or has not."""
        name = key_of(handle)[0]
        # The user may have bound the name to something else while the cell ran in the background.
        if not is_bound and names.get(name) is handle and handle.previous is not None:
            names[name] = handle.previous

    def _is_gone(self, name: str, bound: object, infos: Mapping[int, Any]) -> bool:
        """Whether a deleted name is left on no rank; of ranks that took no part, ask them."""
        own = isinstance(bound, Composite) and key_of(bound)[:2] == (name, ())
        if not own or self._all_ranks.state == "busy":
            return False  # the user's own, or ranks that would have to end a cell to answer
        others = set(self._all_ranks.engines.alive_ranks()) - set(infos)
        return not self.remote.look(name, (), 0, sorted(others))

    def _is_current(self, composite: Composite) -> bool:
        name, _, version = key_of(composite)
        return version == self._versions.of(name)

    def _key_of(self, composite: Composite) -> tuple[str, tuple[str, ...], int]:
        return *self._current(composite), key_of(composite)[2]

    def _current(self, composite: Composite) -> tuple[str, tuple[str, ...]]:
        """Name and path of a Composite of this pool that nothing has taken the place of.

        Raises:
            PoolError: its values are gone.
        """
        name, path, _ = key_of(composite)
        if pool_variables(composite) is not self:
            raise PoolError(f"{composite} is of another pool, whose ranks had the values.")
        if not self._is_current(composite):
            raise PoolError(
                f"this is a handle of an earlier {name}: a later cell has assigned the name again, "
                f"and pool[{name!r}] is what the ranks have now."
            )
        return name, path


def _submodules(module: str, attributes: Iterable[str]) -> Iterator[str]:
    """Loaded submodules of a module that code may mean which mentions these attributes."""
    for attribute in attributes:
        name = f"{module}.{attribute}"
        if name in sys.modules:
            yield name
            yield from _submodules(name, attributes)


def _is_data(info: ValueInfo) -> bool:
    """Whether no code is in a value: it reads nothing later."""
    return info.shape is not None or info.length is not None or info.type in _DATA
