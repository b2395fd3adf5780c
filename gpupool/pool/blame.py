"""Which rank's error is the cause. Pure; runs on the client.

gloo notices that a peer is gone before the agent has told of its death: the ranks that waited for
it fail first, by the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpupool.core.errors import RankError

_LOST_PEER = ("closed by peer", "reset by peer", "connection closed", "broken pipe")
_CONSEQUENCES = ("KeyboardInterrupt", "TimeoutError", "Unresponsive")


def freed_by_a_death(errors: Mapping[int, RankError]) -> dict[int, RankError]:
    """The errors that only say that a peer is gone, as freed, if another rank tells the cause."""
    lost = {rank: error for rank, error in errors.items() if _lost_a_peer(error)}
    causes = [
        error
        for rank, error in errors.items()
        if rank not in lost and not error.freed and error.ename not in _CONSEQUENCES
    ]
    return {rank: replace(error, freed=True) for rank, error in lost.items() if causes}


def _lost_a_peer(error: RankError) -> bool:
    text = error.evalue.lower()
    return error.ename in ("RuntimeError", "DistBackendError", "DistNetworkError") and any(
        words in text for words in _LOST_PEER
    )
