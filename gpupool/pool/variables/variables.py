"""Variables of notebook and ranks: what travels, and handles of what stays. On the client.

The notebook's binding decides. A name that a cell reads and the notebook has is sent, unless the
ranks have the value already; a `Composite` means what each rank has. A value is on every rank that
takes part before any of them runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from types import ModuleType
from typing import Any, TypeGuard

from gpupool.core.errors import PoolError, SpmdError, TransferError
from gpupool.core.wire.calls import (
    Attributes,
    Bind,
    Call,
    Fetch,
    Look,
    Receive,
    RunFunction,
    RunTask,
)
from gpupool.core.wire.global_names import RANK_NAMES
from gpupool.core.wire.masking import redact
from gpupool.core.wire.output import OnOutput
from gpupool.core.wire.pickles import MemoryFile, Source, namespace
from gpupool.core.wire.replies import CodeReply, Value
from gpupool.core.wire.values import Bindings, NamesReport, ValueInfo, Values
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.engines import of_rank
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.notices import OnNotice
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.buffers import Buffers
from gpupool.pool.variables.composite import Composite, Constant, key_of, pool_variables
from gpupool.pool.variables.losses import Losses, Statements
from gpupool.pool.variables.names import Versions, is_hidden, is_of_shell, require_name
from gpupool.pool.variables.parcels import KeptTask, Parcel, Parcels, Shipment

_NOTHING = "", ()  # no rank has anything by this name
_DATA = {"int", "float", "complex", "bool", "NoneType"}  # what else has a shape or a length


class Variables:
    """The variables of one pool, as `pool[...]` and cells see them."""

    def __init__(self, all_ranks: Ranks) -> None:
        self._all_ranks = all_ranks
        self._lock = threading.Lock()
        self.buffers = Buffers()
        self.parcels = Parcels(self.buffers, self._key_of)
        self._there: dict[int, set[int]] = {}  # rank -> parcels that it has been sent
        self._unwanted: list[int] = []  # constants that the notebook has released
        self._versions = Versions()
        self.losses = Losses()
        self._kept = weakref.WeakValueDictionary[int, Parcel]()  # of tasks that have not ended
        # what code of ranks is called by -> names that it may read
        self._rank_reads: dict[str, Collection[str]] = {}

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
        inside: Iterable[str] = (),
        waits: bool = True,
    ) -> Shipment:
        """Bring to `ranks` what they need of the notebook's `names` to run code that reads `reads`.

        Args:
            optional: names that the code may have bound before it reads them: what cannot be sent
                of these is left out, and means nothing on the ranks.
            attributes: what the code mentions behind a dot: submodules may be meant.
            inside: what functions and classes of the code may read when they are called.
            waits: for ranks that are in use; else the values go with the code when its turn comes.

        Raises:
            TransferError: a value cannot be sent, or be read on a rank; nothing is bound then.
        """
        with self._round(names):
            shipment = self._gather(reads, names, optional, attributes)
            shipment.later |= {*inside}
            self._send(shipment, names, ranks, waits=waits)
        return shipment

    def bindings(
        self,
        shipment: Shipment,
        ranks: Sequence[int],
        names: Iterable[str] = (),
        statements: Statements | None = None,
    ) -> dict[int, Bindings]:
        """rank -> what names mean there for a call.

        Args:
            names: what the code binds, to be reported on.
            statements: its imports.
        """
        bound = sorted(filterfalse(is_hidden, {*names, *shipment.bound}))
        with self._lock:
            return {
                rank: Bindings(
                    self._values(shipment.along.get(rank, ()), shipment),
                    modules=sorted(shipment.modules),
                    imports=self.losses.begin(rank, statements or {}, bound),
                    names=bound,
                )
                for rank in ranks
            }

    def bind(self, shipment: Shipment, ranks: Sequence[int]) -> None:
        """Have names mean on the ranks what was shipped."""
        bindings = self.bindings(shipment, ranks)
        calls = {rank: Bind(bindings=bindings[rank]) for rank in ranks}
        Execution(self._all_ranks, calls, unheard_output).result()

    def forget_rank(self, rank: int, how: str) -> None:
        """This rank is new: it has nothing. `how` the old one ended: "was restarted".

        Takes no lock: who holds it may be waiting for this rank.
        """
        self._there.pop(rank, None)
        self.losses.lose(rank, how)

    def not_there(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank does not have these parcels, though they were sent. Others may be sending."""
        self._there.get(rank, set()).difference_update(numbers)

    # ---- out of a cell -------------------------------------------------------------------

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
        """Bind the notebook's names to what a cell has left on the ranks.

        Args:
            names: the notebook's namespace.
            assigned, deleted: names that the cell binds and unbinds.
            reports: rank -> its answer, from those that gave one.
            succeeded: of a failed cell, only names count that have got another value.
            expected: what `expect` gave: the notebook may call something else by these names now.
            later: what functions and classes may read that the cell has bound.
        """
        for name in sorted({*expected, *(name for r in reports.values() for name in r.info)}):
            infos, changed = _of_name(name, reports)
            found = [info for info in infos.values() if info is not None]
            # `x = x` changes nothing, and yet the cell has decided what x is from now on.
            is_bound = bool(found) and (changed or (succeeded and name in assigned))
            handle: Composite | None = expected.get(name)
            bound: object = names.get(name)
            if is_bound and not all(map(_is_data, found)):
                self._rank_reads[name] = {*later, *self._rank_reads.get(name, ())}
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
        """Some ranks have copies of another one's state. Handles still mean what the ranks have;
        what the notebook called its own becomes one, where a rank has a new object by its name."""
        for name in chosen:
            infos, changed = _of_name(name, reports)
            if name in names and changed and not _is_handle(names[name], name):
                names[name] = self._new_composite(name, names[name])
            self.losses.note(name, infos)

    # ---- one by one ----------------------------------------------------------------------

    def get(self, name: str) -> Composite:
        """What the ranks have under a name.

        Raises:
            PoolError: none has anything.
        """
        composite = Composite(self, name, self._versions.of(name))
        # By `exec` or `%run`, ranks may have names that no cell was seen to bind: ask them.
        if not (infos := composite.info):
            hint = self.losses.sentence(name)
            raise PoolError(f"no rank has a variable {name!r}. {hint}".rstrip())
        self.losses.note(name, infos)
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
        self.bind(self.ship([name], {**namespace(), name: value}, ranks), ranks)

    def put(self, value: object) -> Constant:
        """What `Pool.put` does."""
        with self._round(namespace()):
            try:
                number = self.parcels.constant(value).number
            except Exception as error:
                why = self.parcels.why_not(error, "it", value)
                raise TransferError({"the value": why}) from None
        try:
            self.bring([number], self._all_ranks.select(None))
        except BaseException:  # nobody will ever ask for it
            self.release(number)
            raise
        return Constant(self, number, type(value).__name__)

    def bring(self, numbers: Iterable[int], ranks: Sequence[int]) -> None:
        """Bring constants to ranks that lack them, and what their functions read."""
        with self._round(names := namespace()):
            shipment = self._gather(self.parcels.names_in(*numbers)[0], names)
            self._send(shipment, names, ranks, numbers)
        self.bind(shipment, ranks)

    def value_of(self, constant: Constant) -> Any:
        """What a constant is, mapped from where the ranks map it: always the same object.

        A PoolError says that it is of another pool, or refers to what only the ranks have.
        """
        with self._lock:
            return self.parcels.open(constant)

    def release(self, number: int) -> None:
        """Nobody refers to a constant any more. Takes no lock: any thread may be collecting."""
        self._unwanted.append(number)

    def look(self, composite: Composite, text_chars: int = 0) -> dict[int, ValueInfo]:
        """Rank -> what its value is; without the ranks that have none."""
        found = self.ask(Look(*self._current(composite), text_chars))
        hidden = self._all_ranks.secrets
        return {
            rank: replace(info, text=redact(info.text, hidden) if info.text else None)
            for rank, info in found.items()
            if info is not None
        }

    def attributes(self, composite: Composite) -> list[str]:
        """The public attributes of the ranks' values; none while the ranks are busy."""
        if self._all_ranks.state != "idle":  # who completes a name does not wait
            return []
        found = self.ask(Attributes(*self._current(composite)))
        return sorted({attribute for listed in found.values() for attribute in listed})

    def fetch(self, composite: Composite, rank: int) -> Any:
        """The value of one rank; a PoolError if it has none, or it cannot travel."""
        file = MemoryFile()  # the rank writes to it, so that large values are copied once
        key = self._current(composite)
        ask = lambda out: self.ask(Fetch(*key, out), [rank])[rank]  # noqa: E731
        packed = self._all_ranks.carrier.fetched(rank, file, ask)
        try:
            return Source(packed).load()
        except Exception as error:  # DDP wants a process group, for one
            raise PoolError(
                f"{composite} of rank {rank} cannot be made in the notebook, an attribute of it "
                f"perhaps. {type(error).__name__}: {error}",
                ranks=[rank],
            ) from error

    def ask(self, call: Call[Value], ranks: Sequence[int] | None = None) -> dict[int, Value]:
        """Make a quick call about names.

        Raises:
            PoolError: the ranks are busy, or one has no such value.
        """
        if self._all_ranks.state == "busy":  # it would have to wait for the end of a cell
            raise PoolError("the ranks are busy: ask again when the running cell has ended.")
        chosen = self._all_ranks.engines.alive_ranks() if ranks is None else ranks
        try:
            return Execution(self._all_ranks, dict.fromkeys(chosen, call), unheard_output).result()
        except SpmdError as error:
            first = error.first
            raise PoolError(of_rank(first.rank, first.evalue), ranks=[first.rank]) from None

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
        with self._round(names := namespace()):
            # Not kept by the others: the arguments of the next call are other ones.
            parcel = self.parcels.once(call)
            shipment = self._gather(parcel.names_read, names)
            self._send(shipment, names, ranks, parcel.needs)
        bindings = self.bindings(shipment, ranks)
        calls = {r: RunFunction(parcel.wire, parcel.sources, bindings=bindings[r]) for r in ranks}
        execution = Execution(self._all_ranks, calls, on_output, timeout_s, on_notice)
        execution.keeps = parcel, shipment  # until the ranks have read them
        return execution

    def keep_task(self, call: tuple[Any, ...]) -> KeptTask:
        """A (function, args, kwargs) for `begin_task`: it and the names that it reads mean later
        what they mean now.

        Raises:
            TransferError: a part of it cannot be sent.
        """
        with self._round(names := namespace()):
            try:
                parcel = self.parcels.once(call)
            except Exception as error:
                parts = dict(zip(("function", "args", "kwargs"), call, strict=True))
                why = self.parcels.why_not(error, "task", parts)
                raise TransferError({"the call": why}, "task") from None
            shipment = self._gather(parcel.names_read, names)
            numbers = self.parcels.with_needs({*shipment.numbers.values(), *parcel.needs})
            kept = KeptTask(parcel, shipment, [self.parcels.by_number[n] for n in sorted(numbers)])
            self._kept.update((one.number, one) for one in kept.parcels)
            self._note(shipment, names)
        return kept

    def begin_task(self, task: KeptTask, rank: int, on_output: OnOutput) -> Execution[CodeReply]:
        """It on a rank, to be run by the thread that asks."""
        self._all_ranks.wait_until_usable()  # a new rank has nothing
        shipment = replace(task.shipment)  # the same may be tried on another rank
        with self._lock:
            there = self._there.setdefault(rank, set())
            shipment.along = {rank: [one for one in task.parcels if one.number not in there]}
            there.update(one.number for one in task.parcels)
            for name in shipment.numbers:
                self.losses.note(name, {rank: True})
        bindings = self.bindings(shipment, [rank])[rank]
        call = RunTask(task.parcel.wire, task.parcel.sources, bindings=bindings)
        execution = Execution(self._all_ranks, {rank: call}, on_output)
        execution.keeps = task, shipment
        return execution

    # ---- inside --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _round(self, names: Mapping[str, object]) -> Iterator[None]:
        """While entered, nobody else sends anything."""
        self._all_ranks.wait_until_usable()
        with self._lock:
            # `append` and `pop` of a list are atomic, so `release` needs no lock.
            while self._unwanted:
                self.parcels.drop(self._unwanted.pop())
            self.parcels.begin(names)
            yield

    def _send(
        self,
        shipment: Shipment,
        names: dict[str, Any],
        ranks: Sequence[int],
        needs: Iterable[int] = (),
        waits: bool = True,
    ) -> None:
        """Bring the parcels to the ranks that lack them, with those that it `needs` and that have
        no name. The notebook's `names` are going to be bound there."""
        needed = self.parcels.with_needs({*shipment.numbers.values(), *needs})
        # What is noted of a rank that is replaced meanwhile goes with it.
        there = {rank: self._there.setdefault(rank, set()) for rank in ranks}
        parcels = self.parcels.by_number
        lacking = {r: [parcels[n] for n in sorted(needed - has)] for r, has in there.items()}
        # A value that cannot be read must fail the cell before any rank has begun it.
        # Small parcels go along with the cell, as a call of their own costs a round trip, and so do
        # all if that call would wait for its turn, and hold the notebook meanwhile.
        is_small = all(one.goes_along for sent in lacking.values() for one in sent)
        if is_small or (not waits and self._all_ranks.turns.are_in_use(ranks)):
            shipment.along = lacking
        else:
            self._receive(lacking, shipment)
        # Noted also where it only goes along: if the cell never begins, `not_there` takes it back.
        for has in there.values():
            has |= needed
        self._note(shipment, names)
        for name in shipment.numbers:
            self.losses.note(name, dict.fromkeys(ranks, True))

    def _gather(
        self,
        reads: Iterable[str],
        names: Mapping[str, object],
        optional: Collection[str] = (),
        attributes: Iterable[str] = (),
    ) -> Shipment:
        """Follow the names that are read, and those that functions among them read.

        Raises:
            TransferError: a value cannot be sent.
        """
        shipment, problems = Shipment(), dict[str, str]()
        # A queue: functions that are read add the names that they read, in any number of turns.
        queue, seen, may_fail = sorted(reads), set[str](), set(optional)
        while queue:
            name = queue.pop(0)
            if name in seen or is_hidden(name):
                continue
            seen.add(name)
            value = names.get(name)
            if name not in names or is_of_shell(name, value):
                continue
            # `torch.optim` in a cell needs the submodule, which `import torch` alone may not load.
            if isinstance(value, ModuleType):
                shipment.modules.update(_submodules(value.__name__, attributes))
            try:
                if isinstance(value, Composite):
                    other, path = self._current(value)
                    if (other, path) != (name, ()):
                        shipment.aliases[name] = other, path
                    # Code that lives on the ranks may read names that only the notebook has: those
                    # are brought that can be, as nobody knows whether it runs.
                    inside = {*self._rank_reads.get(other, ())}
                    shipment.later |= inside
                    more = inside.difference(seen, queue)
                    may_fail |= more
                    queue += sorted(more)
                elif name not in RANK_NAMES:
                    shipment.numbers[name] = self.parcels.parcel(name, value).number
                    more, binds = self.parcels.names_in(shipment.numbers[name])
                    shipment.later |= more
                    queue += sorted(more)
                    shipment.bound |= binds
            except Exception as error:  # all names are tried: one message lists the problems
                problems[name] = self.parcels.why_not(error, name, value)
        for name in problems.keys() & may_fail:
            shipment.left_out[name] = problems.pop(name)
            shipment.aliases[name] = _NOTHING  # else it would mean what it meant there before
        if problems:
            raise TransferError(problems)
        return shipment

    def _receive(self, lacking: Mapping[int, Sequence[Parcel]], shipment: Shipment) -> None:
        """Have the ranks unpickle what runs somebody's code, before any of them runs the cell."""
        calls = {r: Receive(self._values(p, shipment)) for r, p in lacking.items() if p}
        failed = Execution(self._all_ranks, calls, unheard_output).result()
        problems: dict[str, str] = {}
        for rank, reasons in sorted(failed.items(), reverse=True):  # the first rank has the word
            for number, text in reasons.items():
                # Ranks that could read it hear that it is not wanted, so all have the same.
                self.parcels.drop(number)
                names = [name for name, n in shipment.numbers.items() if n == number]
                text = redact(text, self._all_ranks.secrets)
                problems[", ".join(names) or "the value"] = f"on rank {rank}: {text}"
        if problems:
            raise TransferError(problems)

    def _values(self, parcels: Sequence[Parcel], shipment: Shipment) -> Values:
        """These parcels for a rank, what names mean with them, and where the notebook is."""
        along = {parcel.number: parcel.wire for parcel in parcels}
        return Values(
            list(along.items()),
            shipment.numbers,
            shipment.aliases,
            wanted=sorted(
                {*self.parcels.by_number, *shipment.numbers.values(), *along, *self._kept}
            ),
            place=shipment.place,
            sources={name: text for p in parcels for name, text in p.sources.items()},
        )

    def _note(self, shipment: Shipment, names: dict[str, Any]) -> None:
        """Names are going to be bound on the ranks. A handle of what one of them has meant is of
        no use then, unless the same cell gives that another name: `a, b = b, a`."""
        for name, meaning in (*shipment.numbers.items(), *shipment.aliases.items()):
            self._versions.bind(name, meaning)
        for name in shipment.aliases.keys() - shipment.left_out.keys():
            other, _, version = key_of(names[name])
            if version != self._versions.of(other):
                now = self._versions.of(name)
                names[name] = Composite(self, name, now, previous=names[name].previous)

    def _new_composite(self, name: str, replaced: object) -> Composite:
        version = self._versions.bind(name)
        self.losses.end(name)
        # One back only: a chain of handles would keep every value the name has ever had.
        previous = replaced.previous if _is_handle(replaced, name) else replaced
        return Composite(self, name, version, previous=previous)

    def _key_of(self, composite: Composite) -> tuple[str, tuple[str, ...], int]:
        return *self._current(composite), key_of(composite)[2]

    def _current(self, composite: Composite) -> tuple[str, tuple[str, ...]]:
        """Name and path of a Composite of this pool that nothing has taken the place of.

        Raises:
            PoolError: its values are gone.
        """
        name, path, version = key_of(composite)
        if pool_variables(composite) is not self:
            raise PoolError(f"{composite} is of another pool, whose ranks had the values.")
        if version != self._versions.of(name):
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
