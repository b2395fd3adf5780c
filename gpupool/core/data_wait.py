"""When a training waits for its data too long, and what to change then. Pure; runs anywhere."""

from __future__ import annotations

_LEAST_S, _MUCH = 1.0, 0.3  # in all, and of the time: then it is worth a sentence


def waiting_for_data(wait_s: float, training_s: float) -> str:
    """The bottleneck in words, with what to change; "" if so little of a training was waiting.

    >>> waiting_for_data(38, 100)[:41], waiting_for_data(0.6, 1.2), waiting_for_data(20, 100)
    ('Waiting for data: 38 % of the time. Make ', '', '')
    """
    if wait_s < _LEAST_S or wait_s <= _MUCH * training_s:
        return ""
    return (
        f"Waiting for data: {100 * wait_s / training_s:.0f} % of the time. Make the transform "
        "faster, keep the files on this host (ds.cached(limit_gib)), give each rank more cores, or "
        "try more workers=."
    )
