"""Named state of one rank for others, where these were replaced. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

from gpupool.core.errors import OptionsError
from gpupool.core.progress import progress
from gpupool.core.wire.calls import FetchState, SyncState
from gpupool.core.wire.pickles import MemoryFile, namespace
from gpupool.pool.calls.execution import Execution
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.names import require_name
from gpupool.pool.variables.parcels import Shipment
from gpupool.pool.variables.variables import Variables


def sync_state(
    all_ranks: Ranks,
    variables: Variables,
    source: int,
    names: Sequence[str],
    ranks: str | int | Iterable[int] | None,
) -> tuple[int, ...]:
    """What `Pool.sync_from` does: `ranks` (all others) get what `source` has."""
    if not names:
        raise OptionsError('sync_from: name what to copy, as in sync_from(0, "model").')
    for name in names:
        require_name(name)
    everyone, targets = all_ranks.select(None), all_ranks.select(ranks)
    if source not in everyone or (ranks is not None and source in targets):
        raise OptionsError(
            f"sync_from: {source!r} is to be a rank of 0 to {len(everyone) - 1}, and not one of "
            "those that get its state."
        )
    targets = tuple(rank for rank in targets if rank != source)
    if not targets:
        return ()
    space, chosen = namespace(), list(dict.fromkeys(names))
    # What the notebook has by these names means that on every rank first, as in a cell: the copy of
    # a rank is changed then, and is not sent again by the next cell.
    shipment = variables.ship(chosen, space, everyone)
    with progress(f"Copying {', '.join(chosen)} of rank {source}"), closing(MemoryFile()) as file:
        variables.bind(shipment, everyone)
        ask = lambda out: variables.ask(FetchState(chosen, out), [source])[source]  # noqa: E731
        state = all_ranks.carrier.fetched(source, file, ask)
        bindings = variables.bindings(Shipment(), everyone, chosen)
        states = dict.fromkeys(targets, state)
        calls = {r: SyncState(states.get(r), bindings=bindings[r]) for r in everyone}
        execution = Execution(all_ranks, calls, unheard_output)
        execution.result()
    variables.synced(space, chosen, execution.names)
    return targets
