"""Bring parcels to the ranks, and know which rank has which. Runs on the client."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gpupool.core.errors import TransferError
from gpupool.core.progress import BYTES, Progress, progress
from gpupool.core.wire.calls import Receive
from gpupool.core.wire.masking import redact
from gpupool.core.wire.pickles import Packed
from gpupool.core.wire.values import Place, Values
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.parcels import Parcels, Shipment

_LARGE_BYTES = 32 << 20  # of what is sent
_MAX_NAMED = 3


class Delivery:
    """What each rank has been sent, and what it has yet to hear."""

    def __init__(self, all_ranks: Ranks, parcels: Parcels) -> None:
        self._all_ranks = all_ranks
        self._parcels = parcels
        self._there: dict[int, set[int]] = {}  # rank -> parcels that it has
        self._forget: dict[int, set[int]] = {}  # rank -> parcels that it need not keep
        self._sources: dict[int, set[str]] = {}  # rank -> names of cells' code that it knows
        self._places: dict[int, Place] = {}  # rank -> where it knows that the notebook is

    def send(
        self,
        shipment: Shipment,
        ranks: Sequence[int],
        needs: Iterable[int] = (),
        *,
        first: bool | None = None,
    ) -> None:
        """Bring the parcels to the ranks that lack them.

        Args:
            first: whether they are read before anything runs, or go with the cell. If it is not
                said, those that are small and cannot fail go with it.
        """
        needed = self._parcels.in_order(shipment.numbers, needs)
        place = {number: index for index, number in enumerate(needed)}
        # The ranks bind in this order: a name comes after those that its methods read.
        shipment.numbers = dict(sorted(shipment.numbers.items(), key=lambda item: place[item[1]]))
        lacking = {r: [n for n in needed if n not in self._there.get(r, ())] for r in ranks}
        numbers = [n for n in needed if any(n in missing for missing in lacking.values())]
        num_bytes = sum(map(self._parcels.num_bytes, numbers))
        names = [name for name, number in shipment.numbers.items() if number in numbers]
        with _bar(names, num_bytes) as bar:
            self._bring(shipment, lacking, numbers, bar, first)

    def _bring(
        self,
        shipment: Shipment,
        lacking: Mapping[int, list[int]],
        parcels: Sequence[int],
        bar: Progress,
        first: bool | None,
    ) -> None:
        wires = {number: self._parcels.wire(number, bar.advance) for number in parcels}
        files = [file for _, file in wires.values() if file is not None]
        per_rank = {r: [(n, wires[n][0]) for n in numbers] for r, numbers in lacking.items()}
        # A value that cannot be read must fail the cell before any rank has begun it.
        # Small parcels go along with the cell, as a call of their own costs a round trip.
        if first is None:
            first = bool(files) or not all(self._parcels.is_plain(number) for number in wires)
        if first:
            try:
                # It returns when all ranks have opened the files: these need not outlive it.
                self._receive(per_rank, shipment)
            finally:
                for file in files:
                    file.close()
        else:
            shipment.inline, shipment.files = per_rank, files
        # Noted also where it only goes along: if the cell never begins, `not_there` takes it back.
        for rank, numbers in lacking.items():
            shipment.filenames |= self._parcels.filenames(numbers)
            self._there.setdefault(rank, set()).update(numbers)

    def _receive(
        self, per_rank: Mapping[int, list[tuple[int, Packed]]], shipment: Shipment
    ) -> None:
        """Have the ranks unpickle what runs somebody's code, before any of them runs the cell."""
        place = notebook_place()
        calls = {
            rank: Receive(self.values(rank, wires, shipment, place, ()))
            for rank, wires in per_rank.items()
            if wires
        }
        failed = Execution(self._all_ranks, calls, unheard_output).result()
        problems: dict[str, str] = {}
        for rank, reasons in sorted(failed.items(), reverse=True):  # the first rank has the word
            for number, text in reasons.items():
                self._parcels.drop(number)
                names = [name for name, n in shipment.numbers.items() if n == number]
                text = redact(text, self._all_ranks.secrets)
                problems[", ".join(names) or "a part of them"] = f"on rank {rank}: {text}"
        # Ranks that could read them forget them as well, so that all ranks have the same.
        if problems:
            for rank, wires in per_rank.items():
                self._forget.setdefault(rank, set()).update(number for number, _ in wires)
            raise TransferError(problems)

    def values(
        self,
        rank: int,
        parcels: Sequence[tuple[int, Packed]],
        shipment: Shipment,
        place: Place,
        filenames: Iterable[str],
    ) -> Values:
        """The parcels for a rank, with what it does not know yet: which ones to forget, where the
        notebook is now (`place`), and the text of the cells that code from these files is of."""
        known = self._sources.setdefault(rank, set())
        # With the text, tracebacks of the rank show lines of the notebook's cells.
        sources = sources_of(set(filenames) - known)
        known.update(sources)
        # a search path may have hundreds of entries
        is_known, self._places[rank] = self._places.get(rank) == place, place
        return Values(
            parcels,
            shipment.numbers,
            shipment.aliases,
            forget=sorted(self._forget.pop(rank, ())),
            place=None if is_known else place,
            sources=sources,
        )

    def is_there(self, number: int, ranks: Iterable[int]) -> bool:
        """Whether all these ranks have a parcel."""
        return all(number in self._there.get(rank, ()) for rank in ranks)

    def not_there(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank does not have these, though they were sent. Other threads may be sending."""
        self._there.get(rank, set()).difference_update(numbers)

    def drop(self, numbers: Iterable[int]) -> None:
        """The ranks need these no more; they hear it with the next call."""
        for rank, there in self._there.items():
            unwanted = there.intersection(numbers)
            there -= unwanted
            self._forget.setdefault(rank, set()).update(unwanted)

    def forget_ranks(self, ranks: Iterable[int]) -> None:
        """These ranks are new: they have nothing."""
        for rank in ranks:
            for known in (self._there, self._forget, self._places, self._sources):
                known.pop(rank, None)


@contextmanager
def _bar(names: Sequence[str], num_bytes: int) -> Iterator[Progress]:
    """A bar for what may last; a cell that sends little is quicker without."""
    if num_bytes < _LARGE_BYTES:
        yield Progress("")
        return
    what = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    with progress(f"Sending {what or 'values'}", num_bytes, BYTES) as bar:
        yield bar


def sources_of(filenames: Iterable[str]) -> dict[str, tuple[int, str]]:
    """File name -> (number of the cell, its text), for the names that IPython gave to cells.

    Args:
        filenames: `co_filename` of the code that travels; files on disk are left out.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython's private map from file name to number of the cell; `linecache` has the text.
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {
        name: (numbers[name], "".join(linecache.getlines(name)))
        for name in set(filenames) & set(numbers)
    }
