"""Bring parcels to the ranks, and know which rank has which. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpupool.core.errors import TransferError
from gpupool.core.wire.calls import Receive
from gpupool.core.wire.masking import redact
from gpupool.core.wire.values import Place, Values
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.parcels import Parcel, Parcels, Shipment


class Delivery:
    """What each rank has been sent."""

    def __init__(self, all_ranks: Ranks, parcels: Parcels) -> None:
        self._all_ranks = all_ranks
        self._parcels = parcels
        self._there: dict[int, set[int]] = {}  # rank -> parcels that it has

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
            needs: parcels that have no name.
            first: whether they are read before anything runs, or go with the cell. If it is not
                said, those go with it that are small and cannot fail.
        """
        needed = sorted(self._parcels.with_needs({*shipment.numbers.values(), *needs}))
        lacking = {
            rank: [self._parcels[n] for n in needed if n not in self._there.get(rank, ())]
            for rank in ranks
        }
        # A value that cannot be read must fail the cell before any rank has begun it.
        # Small parcels go along with the cell, as a call of their own costs a round trip.
        if first is None:
            first = not all(p.goes_along for parcels in lacking.values() for p in parcels)
        if first:
            self._receive(lacking, shipment)
        else:
            shipment.along = lacking
        # Noted also where it only goes along: if the cell never begins, `not_there` takes it back.
        for rank in ranks:
            self._there.setdefault(rank, set()).update(needed)

    def _receive(self, per_rank: Mapping[int, Sequence[Parcel]], shipment: Shipment) -> None:
        """Have the ranks unpickle what runs somebody's code, before any of them runs the cell."""
        place = notebook_place()
        calls = {
            rank: Receive(self.values(parcels, shipment, place))
            for rank, parcels in per_rank.items()
            if parcels
        }
        failed = Execution(self._all_ranks, calls, unheard_output).result()
        problems: dict[str, str] = {}
        for rank, reasons in sorted(failed.items(), reverse=True):  # the first rank has the word
            for number, text in reasons.items():
                # Ranks that could read it hear that it is not wanted, so all have the same.
                self._parcels.drop(number)
                names = [name for name, n in shipment.numbers.items() if n == number]
                text = redact(text, self._all_ranks.secrets)
                problems[", ".join(names) or "a part of them"] = f"on rank {rank}: {text}"
        if problems:
            raise TransferError(problems)

    def values(self, parcels: Sequence[Parcel], shipment: Shipment, place: Place) -> Values:
        """These parcels for a rank, what names mean with them, and where the notebook is."""
        along = [(parcel.number, parcel.wire) for parcel in parcels]
        return Values(
            along,
            shipment.numbers,
            shipment.aliases,
            wanted=sorted({*self._parcels.alive(), *shipment.numbers.values(), *dict(along)}),
            place=place,
            sources={name: text for p in parcels for name, text in p.sources.items()},
        )

    def not_there(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank does not have these, though they were sent. Other threads may be sending."""
        self._there.get(rank, set()).difference_update(numbers)

    def forget_ranks(self, ranks: Iterable[int]) -> None:
        """These ranks are new: they have nothing."""
        for rank in ranks:
            self._there.pop(rank, None)
