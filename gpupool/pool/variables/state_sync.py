"""Named state of one rank for others, where these were replaced. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpupool.core.errors import OptionsError, PoolError
from gpupool.core.progress import progress
from gpupool.core.wire.calls import SyncState
from gpupool.core.wire.masking import redact
from gpupool.core.wire.pickles import namespace
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.names import require_name
from gpupool.pool.variables.variables import Variables


def sync_state(
    all_ranks: Ranks,
    variables: Variables,
    source: int,
    names: Sequence[str],
    ranks: str | int | Iterable[int] | None,
) -> tuple[int, ...]:
    """What `Pool.sync_from` does: all ranks take part, `ranks` (all others) get what `source` has.

    Raises:
        OptionsError, PoolError, TransferError, SpmdError: see `Pool.sync_from`.
    """
    targets = _targets(all_ranks, source, names, ranks)
    if not targets:
        return ()
    # All ranks, targets or not: the copy is a broadcast, a collective of the whole group.
    everyone = all_ranks.select(None)
    space, chosen = namespace(), list(dict.fromkeys(names))
    # What the notebook has by these names means that on every rank first, as in a cell: the copy of
    # a rank is changed then, and is not sent again by the next cell.
    shipment = variables.ship(chosen, space, everyone)
    bindings = variables.bindings(shipment, everyone, chosen)
    calls = {rank: SyncState(source, chosen, targets, bindings=bindings[rank]) for rank in everyone}
    execution = Execution(all_ranks, calls, unheard_output)
    execution.keeps = shipment
    with progress(f"Copying {', '.join(chosen)} of rank {source}"):
        replies = execution.result()
    # The source's problem first: that of the others may follow from it.
    for rank, problems in sorted(replies.items(), key=lambda item: (item[0] != source, item[0])):
        for name, text in problems.items():
            lost = variables.losses.sentence(name, rank)
            raise PoolError(
                f"nothing was copied, and no rank has changed anything. On rank {rank}, {name}: "
                f"{redact(text, all_ranks.secrets)}. {lost}".rstrip(),
                ranks=[rank],
            )
    variables.synced(space, chosen, execution.names)
    return targets


def _targets(
    all_ranks: Ranks, source: int, names: Sequence[str], ranks: str | int | Iterable[int] | None
) -> tuple[int, ...]:
    if not names:
        raise OptionsError('sync_from: name what to copy, as in sync_from(0, "model").')
    if not isinstance(source, int) or not 0 <= source < all_ranks.world_size:
        raise OptionsError(
            f"sync_from: {source!r} is no rank; the ranks are 0 to {all_ranks.world_size - 1}."
        )
    for name in names:
        require_name(name)
    chosen = all_ranks.select(ranks)
    if ranks is not None and source in chosen:
        raise OptionsError(f"sync_from: rank {source} has it already: leave it out of the ranks.")
    all_ranks.wait_until_usable()
    return tuple(rank for rank in chosen if rank != source)
