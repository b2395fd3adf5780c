"""The end of a process of a pool: who hears of it, in which words, how long it takes.

Runs on the client.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

DIE_S = 20.0
"""From SIGKILL to the end of a process, at most: the driver takes back 80 GB that it had mapped."""

OnExit = Callable[[str, str, str], None]
"""Hears of each end, in a background thread: name of the process, how it ended, end of its log."""


def exit_reason(status: int, cause: str = "") -> str:
    """How a process ended, in words.

    >>> exit_reason(-9, "out of host memory"), exit_reason(1)
    ('was killed by SIGKILL (out of host memory)', 'ended with exit status 1')
    """
    words = f" ({cause})" if cause else ""
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by {known.get(-status, f'signal {-status}')}{words}"
    return f"ended with exit status {status}{words}"
