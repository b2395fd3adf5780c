"""When a training waits for its data too long, and what to change then. Pure; runs anywhere.

A rank says it once, when the training is over; the monitor says it while there is time.
"""

from __future__ import annotations

_LEAST_S, _MUCH = 1.0, 0.3  # in all, and of the time: then it is worth a sentence


def waits_much(wait_s: float, training_s: float) -> bool:
    """Whether a training of so many seconds has waited so long that a sentence is due.

    >>> waits_much(38, 100), waits_much(0.6, 1.2), waits_much(20, 100)
    (True, False, False)
    """
    return wait_s >= _LEAST_S and wait_s > _MUCH * training_s


def waiting_for_data(share: float, read_by: str, workers: int | None = None) -> str:
    """The bottleneck in words, with what to change.

    Args:
        share: of the time, 0..1.
        read_by: as in `DataEvent`: "8 threads"; "" of datastores and streams.
        workers: as in `TrainingOptions`.

    >>> waiting_for_data(0.38, "2 threads")[:59]
    'Waiting for data: 38 % of the time. It is read by 2 threads'
    """
    said = f"Waiting for data: {100 * share:.0f} % of the time."
    if not read_by:
        return (
            f"{said} Make the transform faster or the pictures smaller, keep the files on this "
            "host (ds.cached(limit_gib)), or give each rank more cores."
        )
    more = "leave workers=0 out, or choose more" if workers == 0 else "try more workers="
    return (
        f"{said} It is read by {read_by}: {more}, make __getitem__ or its transform faster, keep "
        "what it computes in memory or in files, or read pictures by a gpupool.ImageDatastore."
    )
