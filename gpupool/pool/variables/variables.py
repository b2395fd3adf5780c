"""Variables of notebook and ranks: what travels, and what names mean there. On the client.

The notebook's binding decides. A name that a cell reads and the notebook has is sent, unless the
ranks have the value already; a `Composite` means what each rank has. A value is on every rank that
takes part before any of them runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from types import ModuleType
from typing import Any

from gpupool.core.errors import OptionsError, TransferError
from gpupool.core.progress import progress
from gpupool.core.wire.calls import Bind, FetchState, Receive, RunFunction, RunTask, SyncState
from gpupool.core.wire.global_names import RANK_NAMES
from gpupool.core.wire.masking import redact
from gpupool.core.wire.output import OnOutput
from gpupool.core.wire.pickles import MemoryFile, namespace
from gpupool.core.wire.replies import CodeReply
from gpupool.core.wire.values import Bindings, Values
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.client import unheard_output
from gpupool.pool.notices import OnNotice
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.buffers import Buffers
from gpupool.pool.variables.composite import Composite, Constant, Handles, key_of
from gpupool.pool.variables.names import Statements, is_hidden, is_of_shell, require_name
from gpupool.pool.variables.parcels import KeptCall, Parcel, Parcels, Shipment

_NOTHING = "", ()  # no rank has anything by this name


class Variables:
    """The variables of one pool, as `pool[...]` and cells see them."""

    def __init__(self, all_ranks: Ranks) -> None:
        self._all_ranks = all_ranks
        self._lock = threading.Lock()
        self.handles = Handles(all_ranks)
        self.losses = self.handles.losses
        self.buffers = Buffers()
        self.parcels = Parcels(self.buffers, self.handles.current)
        self._there: dict[int, set[int]] = {}  # rank -> parcels that it has been sent

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
        needs: Collection[int] = (),
        waits: bool = True,
    ) -> Shipment:
        """Bring to `ranks` what they need of the notebook's `names` to run code that reads `reads`;
        after a TransferError nothing is bound.

        Args:
            optional: names that the code may have bound before it reads them: what cannot be sent
                of these is left out, and means nothing on the ranks.
            attributes: what the code mentions behind a dot: submodules may be meant.
            inside: what functions and classes of the code may read when they are called.
            needs: constants that have no name.
            waits: for ranks that are in use; else the values go with the code when its turn comes.
        """
        with self._round(names):
            shipment = self._gather(reads, names, optional, attributes, needs)
            shipment.later |= {*inside}
            along = not waits and self._all_ranks.turns.are_in_use(ranks)
            self._send(shipment, ranks, along)
            self._note(names, shipment)
        return shipment

    def bindings(
        self,
        shipment: Shipment,
        ranks: Sequence[int],
        names: Iterable[str] = (),
        statements: Statements | None = None,
    ) -> dict[int, Bindings]:
        """rank -> what names mean there for a call; its code binds `names`, and `statements`."""
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
        """Have names mean on the ranks, from now on, what was shipped."""
        bindings = self.bindings(shipment, ranks)
        calls = {rank: Bind(bindings=bindings[rank]) for rank in ranks}
        Execution(self._all_ranks, calls, unheard_output).result()

    def forget_rank(self, rank: int, how: str) -> None:
        """This rank is new, as the old one "was restarted", say."""
        # without the lock: who holds it may be waiting for this rank
        self._there.pop(rank, None)
        self.losses.lose(rank, how)

    def not_there(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank does not have these parcels, though they were sent. Others may be sending."""
        self._there.get(rank, set()).difference_update(numbers)

    # ---- by themselves -------------------------------------------------------------------

    def set(self, name: str, value: object) -> None:
        """Put a value on every rank; a PoolError refuses the name, a TransferError the value."""
        require_name(name)
        ranks = self._all_ranks.select(None)  # also those that are just being replaced
        # A copy of the namespace: the notebook's own name keeps its meaning.
        self.bind(self.ship([name], {**namespace(), name: value}, ranks), ranks)

    def put(self, value: object) -> Constant:
        with self._round(namespace()):
            try:
                constant = self.parcels.constant(value, self)
            except Exception as error:
                why = self.parcels.why_not(error, "it", value)
                raise TransferError({"the value": why}) from None
        try:
            self.bring([constant.number], self._all_ranks.select(None))
        except BaseException:
            del constant  # which the traceback would keep: nobody will ever ask for it
            raise
        return constant

    def bring(self, numbers: Collection[int], ranks: Sequence[int]) -> None:
        """Bring constants, and what their functions read, to ranks that lack them."""
        self.bind(self.ship((), namespace(), ranks, needs=numbers), ranks)

    def value_of(self, constant: Constant) -> Any:
        with self._lock:
            return self.parcels.open(constant)

    def sync(
        self, source: int, names: Sequence[str], ranks: str | int | Iterable[int] | None
    ) -> tuple[int, ...]:
        """What `Pool.sync_from` does: `ranks` (all others) get what `source` has."""
        if not names:
            raise OptionsError('sync_from: name what to copy, as in sync_from(0, "model").')
        for name in names:
            require_name(name)
        everyone, targets = self._all_ranks.select(None), self._all_ranks.select(ranks)
        if source not in everyone or (ranks is not None and source in targets):
            raise OptionsError(
                f"sync_from: {source!r} is to be a rank of 0 to {len(everyone) - 1}, and not one "
                "of those that get its state."
            )
        targets = tuple(rank for rank in targets if rank != source)
        space, chosen = namespace(), list(dict.fromkeys(names))
        # What the notebook has by these names means that on every rank first, as in a cell: the
        # copy of a rank is changed then, and is not sent again by the next cell.
        shipment = self.ship(chosen, space, everyone)
        title = f"Copying {', '.join(chosen)} of rank {source}"
        with progress(title), contextlib.closing(MemoryFile()) as file:
            self.bind(shipment, everyone)
            state = self.handles.fetch_packed(source, file, partial(FetchState, chosen))
            bindings = self.bindings(Shipment(), everyone, chosen)
            states = dict.fromkeys(targets, state)
            calls = {r: SyncState(states.get(r), bindings=bindings[r]) for r in everyone}
            execution = Execution(self._all_ranks, calls, unheard_output)
            execution.result()
        self.handles.synced(space, chosen, execution.names)
        return targets

    # ---- functions and tasks -------------------------------------------------------------

    def keep_call(self, call: tuple[Any, ...]) -> KeptCall:
        """A (function, args, kwargs), and the names that it reads: they mean later what they mean
        now. A TransferError names the part of it that cannot be sent."""
        with self._round(names := namespace()):
            try:
                parcel = self.parcels.once(call)
            except Exception as error:
                parts = dict(zip(("function", "args", "kwargs"), call, strict=True))
                why = self.parcels.why_not(error, "it", parts)
                raise TransferError({"the call": why}, "function") from None
            shipment = self._gather(parcel.names_read, names, needs=parcel.needs)
            self._note(names, shipment)
        return parcel, shipment

    def begin_call(
        self,
        kept: KeptCall,
        ranks: Sequence[int],
        on_output: OnOutput,
        timeout_s: float | None = None,
        on_notice: OnNotice | None = None,
        kind: type[RunFunction] = RunFunction,
    ) -> Execution[CodeReply]:
        """Start it on ranks."""
        parcel, shipment = kept
        shipment = replace(shipment)  # it may be tried on another rank
        with self._lock:
            self._send(shipment, ranks, along=kind is RunTask)
        bindings = self.bindings(shipment, ranks)
        calls = {r: kind(parcel.wire, parcel.sources, bindings=bindings[r]) for r in ranks}
        kept = parcel, shipment  # until the ranks have read it
        return Execution(self._all_ranks, calls, on_output, timeout_s, on_notice, kept)

    def begin_task(self, kept: KeptCall, rank: int, on_output: OnOutput) -> Execution[CodeReply]:
        """It as a task, to be run by the thread that asks."""
        self._all_ranks.wait_until_usable()  # a new rank has nothing
        return self.begin_call(kept, [rank], on_output, kind=RunTask)

    # ---- inside --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _round(self, names: Mapping[str, object]) -> Iterator[None]:
        """While entered, nobody else sends anything."""
        self._all_ranks.wait_until_usable()
        with self._lock:
            self.parcels.begin(names)
            yield

    def _gather(
        self,
        reads: Iterable[str],
        names: Mapping[str, object],
        optional: Collection[str] = (),
        attributes: Iterable[str] = (),
        needs: Collection[int] = (),
    ) -> Shipment:
        """Follow the names that code and the parcels that it `needs` read, and so on."""
        shipment, problems = Shipment(), dict[str, str]()
        queue, seen = sorted({*reads, *self.parcels.names_in(*needs)[0]}), set[str]()
        may_fail = set(optional)
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
                    other, path, _ = self.handles.current(value)
                    if (other, path) != (name, ()):
                        shipment.aliases[name] = other, path
                    # Code that lives on the ranks may read names that only the notebook has: those
                    # are brought that can be, as nobody knows whether it runs.
                    more = {*self.handles.reads[other]}
                    may_fail |= more.difference(seen, queue)
                elif name in RANK_NAMES:
                    continue
                else:
                    shipment.numbers[name] = self.parcels.parcel(name, value).number
                    more, binds = self.parcels.names_in(shipment.numbers[name])
                    shipment.bound |= binds
                shipment.later |= more
                queue += sorted(more)
            except Exception as error:  # all names are tried: one message lists the problems
                problems[name] = self.parcels.why_not(error, name, value)
        for name in problems.keys() & may_fail:
            shipment.left_out[name] = problems.pop(name)
            shipment.aliases[name] = _NOTHING  # else it would mean what it meant there before
        if problems:
            raise TransferError(problems)
        shipment.parcels = self.parcels.with_needs({*shipment.numbers.values(), *needs})
        return shipment

    def _send(self, shipment: Shipment, ranks: Sequence[int], along: bool = False) -> None:
        """Bring its parcels to the ranks that lack them, or have them go `along` with the call."""
        # What is noted of a rank that is replaced meanwhile goes with it.
        there = {rank: self._there.setdefault(rank, set()) for rank in ranks}
        lacking = {
            rank: [one for one in shipment.parcels if one.number not in has]
            for rank, has in there.items()
        }
        # A value that cannot be read must fail the cell before any rank has begun it. The call for
        # that costs a round trip, and would hold the notebook while it waits for its turn.
        if along or all(one.goes_along for sent in lacking.values() for one in sent):
            shipment.along = lacking
        else:
            self._receive(lacking, shipment)
        # Noted also where it only goes along: if the cell never begins, `not_there` takes it back.
        for has in there.values():
            has.update(one.number for one in shipment.parcels)
        for name in shipment.numbers:
            self.losses.note(name, dict.fromkeys(ranks, True))

    def _receive(self, lacking: Mapping[int, Sequence[Parcel]], shipment: Shipment) -> None:
        """Have the ranks unpickle these, before any of them runs the cell."""
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
        return Values(
            [(parcel.number, parcel.wire) for parcel in parcels],
            shipment.numbers,
            shipment.aliases,
            wanted=sorted(self.parcels.alive),
            place=shipment.place,
            sources={name: text for p in parcels for name, text in p.sources.items()},
        )

    def _note(self, names: dict[str, Any], shipment: Shipment) -> None:
        """Names are going to be bound on the ranks. A handle of what one of them has meant is of
        no use then, unless the same cell gives that another name: `a, b = b, a`."""
        for name, meaning in (*shipment.numbers.items(), *shipment.aliases.items()):
            self.handles.bind(name, meaning)
        for name in shipment.aliases.keys() - shipment.left_out.keys():
            other, _, version = key_of(names[name])
            if version != self.handles.version(other):
                names[name] = self.handles.handle(name, names[name].previous)


def _submodules(module: str, attributes: Iterable[str]) -> Iterator[str]:
    """Loaded submodules of a module that code may mean which mentions these attributes."""
    for attribute in attributes:
        name = f"{module}.{attribute}"
        if name in sys.modules:
            yield name
            yield from _submodules(name, attributes)
