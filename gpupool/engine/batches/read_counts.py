"""What was read again, and what could not be read, over all ranks. Runs on engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpupool.core.errors import TrainingError
from gpupool.core.wire.events import DataEvent
from gpupool.data.reading.samples import Skipped
from gpupool.data.stores.retry import counts
from gpupool.engine.group.forming import World

NUM_READ = 2  # numbers of each rank about what it has read
_MAX_NAMED = 5  # samples that an error names


@dataclass
class Pass:
    """An epoch, or a validation: what errors call it, and what was `skipped` on all ranks.

    `num_samples` is 0 where it is not known, for a stream.
    """

    name: str = ""
    num_samples: int = 0
    most_skipped: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, skipped: Sequence[Skipped]) -> None:
        """Raises TrainingError if it is more than may be."""
        self.skipped += skipped
        # Of one damaged image a patch datastore may skip many samples.
        if len(self.skipped) <= self.most_skipped or len({one.url for one in self.skipped}) == 1:
            return
        named = ", ".join(f"{one.url} ({one.reason})" for one in self.skipped[:_MAX_NAMED])
        raise TrainingError(
            f"{self.name}: {len(self.skipped):,} of {self.num_samples:,} samples could not be "
            f"read so far, more than the {self.most_skipped:,} that on_error='skip' leaves out, "
            f"such as {named}. Repair them."
        )


class ReadCounts:
    """Accounts for the passes over data sets; `now` is the present one.

    A few numbers of each rank travel with those of the steps (`numbers`). The URLs of skipped
    samples are gathered only where there are some, which every rank then knows (`add_sums`).
    """

    def __init__(self, world: World) -> None:
        self.now = Pass()
        self._world = world
        self._before = counts.snapshot()
        self._skipped_here: list[Skipped] = []
        self._sent: list[Skipped] = []  # those that `numbers` has counted
        self._reason = self._read_by = ""

    def add_skipped(self, skipped: Sequence[Skipped]) -> None:
        """Note what a share of this rank lacks."""
        self._skipped_here += skipped

    def numbers(self) -> list[int]:
        """How many reads this rank has made again, and samples skipped, since the last call."""
        now = counts.snapshot()
        here, self._before = now - self._before, now
        self._reason = here.last_reason
        self._sent, self._skipped_here = self._skipped_here, []
        return [here.retries, len(self._sent)]

    def add_sums(
        self, sums: Sequence[float], step: int, epoch: int, read_by: str
    ) -> DataEvent | None:
        """What to report, given the sum of all ranks' `numbers`; None if there is no news.

        `read_by` as in `DataEvent`.

        Raises TrainingError, on every rank alike, if more was skipped than is allowed.
        """
        num_retried, num_skipped = map(int, sums)
        new: list[Skipped] = []
        if num_skipped:
            new = [one for part in self._world.gather(self._sent) for one in part]
            self.now.add(new)
        if not any(sums) and read_by == self._read_by:
            return None
        self._read_by = read_by
        reason = self._reason
        return DataEvent(step, epoch, num_retried, reason, num_skipped, dict(new), read_by)
