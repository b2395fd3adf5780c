"""How each rank fared along the steps: its reports in at most 100 buckets. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable

from gpupool.core.wire.events import RankEvent

MAX_BUCKETS = 100

_Cell = list[list[float]]  # of each quantity [sum of value times steps, steps]


class Timeline:
    """Means of what ranks report, by buckets of steps; what an event costs does not grow.

    Quantities are `NAMES`: seconds of a rank's own work in a step, the share (0..1) of a step that
    it waits for the other ranks, and the utilization (0..1) of its device. Bucket n has the steps
    after `width` * n up to `width` * (n + 1); where there are more than 100, two become one.
    """

    NAMES = ("own", "wait", "utilization")

    def __init__(self) -> None:
        self.width = 1
        self._cells: dict[int, list[_Cell]] = {}
        self._done: dict[int, int] = {}  # the last step of each rank that has a report

    @property
    def num_buckets(self) -> int:
        """Buckets so far."""
        return max(map(len, self._cells.values()), default=0)

    def add(self, event: RankEvent) -> None:
        """Add a report: it is of all steps since the last one of its rank."""
        first = self._done.get(event.rank, 0)
        # Fewer than before: the ranks have begun again from a checkpoint.
        first = first if first < event.step else event.step - 1 if first > event.step else first
        self._done[event.rank] = event.step
        while event.step > MAX_BUCKETS * self.width:
            self._double()
        if event.step <= first:
            return
        values = _values(event)
        cells = self._cells.setdefault(event.rank, [])
        last = (event.step - 1) // self.width
        cells += [[[0.0, 0.0] for _ in values] for _ in range(last + 1 - len(cells))]
        for bucket in range(first // self.width, last + 1):
            begin, end = bucket * self.width, (bucket + 1) * self.width
            num_steps = min(end, event.step) - max(begin, first)
            for value, sums in zip(values, cells[bucket], strict=True):
                if value is not None:
                    sums[0] += value * num_steps
                    sums[1] += num_steps

    def means(self, rank: int, name: str) -> list[float | None]:
        """A value for each bucket of a rank; None where nothing was reported."""
        index = self.NAMES.index(name)
        found = [sums[index] for sums in self._cells.get(rank, [])]
        means: list[float | None] = [total / num if num else None for total, num in found]
        return means + [None] * (self.num_buckets - len(means))

    def _double(self) -> None:
        self.width *= 2
        for rank, cells in self._cells.items():
            pairs = [cells[n : n + 2] for n in range(0, len(cells), 2)]
            self._cells[rank] = [_sum(pair) for pair in pairs]


def _sum(cells: Iterable[_Cell]) -> _Cell:
    return [[sum(part) for part in zip(*sums, strict=True)] for sums in zip(*cells, strict=True)]


def _values(event: RankEvent) -> tuple[float | None, float | None, float | None]:
    own = event.step_s if event.work_s is None else event.work_s
    wait = None
    if event.work_s is not None and event.step_s:
        wait = max(0.0, 1 - event.work_s / event.step_s)
    return own, wait, event.utilization
