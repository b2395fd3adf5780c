"""What an abort of collectives may have spoilt: steps and tensors. Runs on engines.

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
        abort.watchers.add(self)

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


class Tensors:
    """Whether tensors of cells may hold unfinished numbers: `tensors` is the one there is.

    So it is if collectives were aborted before a device that lags had computed all that a cell has
    given it.
    """

    def __init__(self) -> None:
        self._is_busy = self._is_aborted = False
        abort.watchers.add(self)

    def begin_call(self) -> None:
        """Code of the user's begins, and may give the device work."""
        self._is_busy, self._is_aborted = True, False

    def drained(self) -> None:
        """The device has computed all that it was given."""
        self._is_busy = False

    def freeze(self) -> None:
        """As that of `CompletedSteps`."""
        self._is_aborted |= self._is_busy

    def are_unfinished(self) -> bool:
        """After an error: whether collectives were aborted, or are if the group is formed again,
        before the device has computed what it was given.
        """
        if not self._is_busy:
            return False
        device = devices.in_use()
        if device is None or not device.lags:
            return False
        try:
            return self._is_aborted or not device.is_done()
        except RuntimeError:  # its context is lost, and so is what it has computed
            return False


tensors = Tensors()
