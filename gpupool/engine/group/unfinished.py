"""Which steps of a training an abort of collectives may have spoilt. Runs on engines.

On gloo an aborted collective raises where it stands. On NCCL nothing raises: the host has given the
device more work by then, the kernel leaves with half a sum in its buffer, and what is queued behind
it is computed with that. So what counts is how far the device was just before the abort.

Nothing here knows which device it is: only that it lags behind the host, or does not.
"""

from __future__ import annotations

import torch

from gpupool.data import device as devices
from gpupool.engine.group import abort


class CompletedSteps:
    """Counts the steps of a training, on the device itself.

    The host's last complete step need not be the device's. Of what is copied from the device after
    an abort, it says whether all steps before the copy were computed with whole sums.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = devices.of(device)
        self._counter = self._device.counter()
        self._num_begun = 0
        self._at_abort: int | None = None
        abort.before_abort = self.freeze

    def add(self) -> None:
        """The host has given the device all that belongs to a step."""
        self._num_begun += 1
        self._counter.advance()

    def freeze(self) -> None:
        """Collectives are about to be aborted; called in the thread that does it."""
        if self._at_abort is None:  # later ones find more steps that were computed with half sums
            self._at_abort = self._counter.value()

    def why_spoilt(self) -> str:
        """Why the device's state after the last step is worth nothing; "" if it is sound.

        To be asked when the device has made a copy of the state: sooner, the abort may yet come.
        """
        if not self._device.lags or self._at_abort in (None, self._num_begun):
            return ""
        return (
            f"the device had completed {self._at_abort:,} of {self._num_begun:,} steps when the "
            "collectives of the others were aborted"
        )

    def why_spoilt_at_end(self) -> str:
        """As `why_spoilt`, after waiting until the device has computed everything."""
        self._device.synchronize()
        return self.why_spoilt()
