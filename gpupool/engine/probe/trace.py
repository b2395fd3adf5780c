"""A trace of a few steps from every rank, for Perfetto and TensorBoard. Runs on engines."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from gpupool.core.errors import DataError
from gpupool.core.progress import progress
from gpupool.core.wire.events import Event, ProfileEvent
from gpupool.data import device as devices
from gpupool.data.stores.writable import Target
from gpupool.engine.group.forming import World

_SKIPPED, _TRACED = 10, 5  # steps: the slow first ones are left out
_DEAREST = 10


class Trace:
    """The trace that the option `profile` asks for: `rank-0.pt.trace.json.gz` and so on at `url`.

    It is of steps 11 to 15 of this training, or of what a resumed one still does. `problem` says
    why it could not be written. `emit` gets what took longest.
    """

    def __init__(self, url: str | None, world: World, emit: Callable[[Event], None]) -> None:
        self._url, self._world, self._emit = url, world, emit
        self._profile: profile | None = None  # while it is recorded
        self._num_steps, self.problem = 0, ""

    def check(self) -> None:
        """Make sure that it can be written. Raises DataError if not."""
        if self._url is not None and self._world.rank == 0:
            Target(self._url).check()

    def stepped(self) -> None:
        self._num_steps += 1
        if self._profile is not None:
            self._profile.step()  # marks the steps in the viewer
            if self._num_steps == _SKIPPED + _TRACED:
                self.write()
        elif self._url is not None and self._num_steps == _SKIPPED:
            self._begin()

    def drop(self) -> None:
        """End what was begun, so that another trace can begin."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = None

    def write(self) -> None:
        """Write what was recorded, if it is not yet: also where training ends before its steps."""
        steps = self._num_steps - _SKIPPED
        if self._profile is None or self._url is None or steps == 0:
            self.drop()
            return
        # Kernels that still run would be missing from the trace.
        devices.of(self._world.device).synchronize()
        with progress("saving the profile"), tempfile.TemporaryDirectory() as folder:
            self._profile.stop()
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self._emit(ProfileEvent(self._world.rank, steps, _dearest(self._profile)))
            self._profile = None
            data = gzip.compress(path.read_bytes(), compresslevel=5)
            try:
                Target(self._url).put(f"rank-{self._world.rank}.pt.trace.json.gz", data)
            except DataError as error:  # training continues without it
                self.problem = f"a trace could not be written: {error}"

    def _begin(self) -> None:
        kinds = {ProfilerActivity.CPU}
        if self._world.device.type == "cuda":
            kinds.add(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write its stages to stderr
        # without `acc_events` some versions warn of cycles, of which there is one here
        self._profile = profile(activities=kinds, acc_events=True)
        self._profile.start()


def _dearest(traced: profile) -> list[tuple[str, int, float, float]]:
    """See `ProfileEvent`; the marks of the steps themselves are no operators."""
    found = [
        (one.key, one.count, one.self_cpu_time_total / 1e3, one.self_device_time_total / 1e3)
        for one in traced.key_averages()
        if not one.key.startswith("ProfilerStep")
    ]
    return sorted(found, key=lambda one: one[2] + one[3], reverse=True)[:_DEAREST]
