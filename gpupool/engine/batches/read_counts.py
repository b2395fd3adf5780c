"""What reading took, and what could not be read, over all ranks. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpupool.core.data_wait import waiting_for_data
from gpupool.core.errors import TrainingError
from gpupool.core.wire.events import DataEvent
from gpupool.data.reading.samples import Skipped
from gpupool.data.stores.retry import Counts, counts
from gpupool.engine.group.forming import World

NUM_READ = 4  # numbers of each rank about what it has read
_MAX_NAMED = 5  # samples that an error names


class ReadCounts:
    """Accounts for one pass over a data set: an epoch, or a validation.

    A few numbers of each rank travel with those of the steps (`numbers`). The URLs of skipped
    samples are gathered only where there are some, which every rank then knows (`add_sums`).
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._skipped_here: list[Skipped] = []
        self._skipped_counted: list[Skipped] = []  # those that `numbers` has counted
        self._before = counts.snapshot()
        self._here = Counts()
        self._unreported = [0, 0, 0]  # reads, cached and retried of all ranks
        self._read_by = ""
        self._steps_since: float | None = None
        self._wait_s = self._steps_s = 0.0
        self.begin("", 0, 0)

    def begin(self, name: str, num_samples: int, most_skipped: int) -> None:
        """A pass begins: what errors call it, and how many samples may be skipped.

        `num_samples` is 0 where it is not known, for a stream.
        """
        self._name, self._num_samples, self._most_skipped = name, num_samples, most_skipped
        self._skipped: list[Skipped] = []

    def pause(self) -> tuple[Any, ...]:
        """What `resume` needs to continue this pass after another one."""
        return self._name, self._num_samples, self._most_skipped, self._skipped

    def resume(self, paused: tuple[Any, ...]) -> None:
        """Continue a pass."""
        self._name, self._num_samples, self._most_skipped, self._skipped = paused

    def add_skipped(self, skipped: Sequence[Skipped]) -> None:
        """Note what a share of this rank lacks."""
        self._skipped_here += skipped

    def numbers(self) -> list[int]:
        """This rank's [reads, cached, retried, skipped] since the last call."""
        now = counts.snapshot()
        self._here, self._before = now - self._before, now
        here = self._here
        new, self._skipped_here = self._skipped_here, []
        self._skipped_counted += new
        return [here.reads, here.cached_reads, here.retries, len(new)]

    def add_sums(
        self, sums: Sequence[float], step: int, epoch: int, read_by: str
    ) -> DataEvent | None:
        """What to report, given the sum of all ranks' `numbers`; None if there is no news.

        `read_by` as in `DataEvent`.

        Raises TrainingError, on every rank alike, if more was skipped than is allowed.
        """
        self._unreported = [a + int(b) for a, b in zip(self._unreported, sums[:3], strict=True)]
        num_skipped = int(sums[3])
        new: list[Skipped] = []
        if num_skipped:
            new = [one for part in self._world.gather(self._skipped_counted) for one in part]
            self._skipped_counted = []
            self._skipped += new
        # Of one damaged image a patch datastore may skip many samples.
        is_one_image = len({one.url for one in self._skipped}) == 1
        if len(self._skipped) > self._most_skipped and not is_one_image:
            raise self._too_many()
        is_other = read_by != self._read_by
        if not any(sums[1:]) and not is_other:  # reads that went well are no news
            return None
        self._read_by = read_by
        (reads, cached, retried), self._unreported = self._unreported, [0, 0, 0]
        reason = self._here.last_reason
        took = reads, cached, retried, reason, num_skipped, dict(new), read_by
        return DataEvent(step, epoch, *took)

    def add_wait(self, wait_s: float) -> None:
        """Note what a step has waited for its share."""
        now = time.perf_counter()
        if self._steps_since is None:  # of the first one: it measures, and starts what reads
            self._steps_since = now
            return
        self._wait_s, self._steps_s = self._wait_s + wait_s, now - self._steps_since

    def waiting(self) -> str:
        """What to change where the ranks have waited for data; "" where they have not.

        The same on every rank, as each of them calls it.
        """
        return waiting_for_data(*max(self._world.gather((self._wait_s, self._steps_s))))

    def check_complete(self, num_counted: int) -> None:
        """Each sample of the pass was counted or skipped, once; raises TrainingError otherwise."""
        if self._num_samples and num_counted + len(self._skipped) != self._num_samples:
            raise TrainingError(
                f"{self._name}: {num_counted:,} samples were counted and {len(self._skipped):,} "
                f"skipped of {self._num_samples:,}; this is a fault of gpupool, please report it."
            )

    def _too_many(self) -> TrainingError:
        named = ", ".join(f"{one.url} ({one.reason})" for one in self._skipped[:_MAX_NAMED])
        more = ", ..." if len(self._skipped) > _MAX_NAMED else ""
        return TrainingError(
            f"{self._name}: {len(self._skipped):,} of {self._num_samples:,} samples could not be "
            f"read so far, more than the {self._most_skipped:,} that on_error='skip' leaves out: "
            f"{named}{more}. Repair them."
        )
