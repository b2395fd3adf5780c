"""Sums over the ranks of what steps leave on their devices, a block of steps at a time.

    sums = Sums(world, every_s=1.0, most=10)
    sums.add([(loss, num_samples)])    # in each step; nothing is read from the device
    if sums.is_full:                   # on all ranks after the same step, as the last block agreed
        sums.begin(wants_stop)         # waits for no rank and no device
        rows, wishes = sums.finish()   # at once, or a step later

One small all-reduce for a block costs less than one for each step, and it carries whatever else
all ranks have to know alike. Runs on engines; knows only torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpupool.engine.group.forming import World

Number = float | Tensor
Weighed = tuple[Number, Number]
"""A value and its weight. What has the weight 0 counts nothing, whatever it is."""


class Sums:
    """Sums rows of weighed values; each rank adds as many rows, each as wide.

    Args:
        every_s: about how long a block lasts. Clocks of ranks differ, so in each block the first
            rank says how many rows the next one has, and no row needs a collective for it. Only a
            rank that is alone asks its clock after each row.
        most: rows of a block at most.
        clock: seconds.
    """

    def __init__(
        self,
        world: World,
        every_s: float,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._world, self._every_s, self._most, self._clock = world, every_s, most, clock
        self._rows: list[Sequence[Weighed]] = []
        self._width = 0
        self._begun: tuple[int, Callable[[], list[float]]] | None = None
        self._block = 1  # the first row sets things up, and says nothing of the others
        self._begun_at = clock()

    def add(self, row: Sequence[Weighed]) -> None:
        """Note a row; tensors of it stay on the device."""
        self._width = len(row)
        self._rows.append(row)

    @property
    def is_full(self) -> bool:
        """Whether it is time to sum, on every rank alike."""
        return len(self._rows) >= self._most or self.is_late

    @property
    def is_late(self) -> bool:
        """As `is_full`; because about `every_s` is over, which holds less than `most` rows."""
        is_over = self._world.size == 1 and self._clock() - self._begun_at >= self._every_s
        return is_over or len(self._rows) >= self._block < self._most

    @property
    def is_begun(self) -> bool:
        """Whether there is something to `finish`."""
        return self._begun is not None

    def begin(self, *wishes: float) -> None:
        """Begin to sum the rows since the last call over the ranks, and these numbers with them."""
        rows, self._rows = self._rows, []
        device = self._world.device
        values, weights = (
            _on_device([pair[i] for row in rows for pair in row], device) for i in (0, 1)
        )
        values = torch.where(weights > 0, values * weights, 0.0)  # as 0 times NaN is NaN
        tail = _on_device([*wishes, self._next_block(len(rows))], device)
        self._begun_at = self._clock()
        self._begun = len(rows), self._world.sum_later(torch.cat([values, weights, tail]))

    def finish(self) -> tuple[list[list[tuple[float, float]]], list[float]]:
        """For each row its sums of (value * weight, weight), and the sums of the wishes; waits."""
        assert self._begun is not None
        (num_rows, received), self._begun = self._begun, None
        *numbers, size = received()
        self._block = int(size)
        num = self._width * num_rows
        pairs = list(zip(numbers[:num], numbers[num : 2 * num], strict=True))
        rows = [pairs[i : i + self._width] for i in range(0, num, self._width)]
        return rows, numbers[2 * num :]

    def _next_block(self, num_rows: int) -> int:
        """How many rows the next block has: the first rank says, the others add 0 to it."""
        if self._world.rank != 0:
            return 0
        row_s = (self._clock() - self._begun_at) / num_rows
        return max(1, min(self._most, round(self._every_s / max(row_s, 1e-9))))


def _on_device(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Numbers as one float64 tensor; those that are on the device are not read."""
    plain = [0.0 if isinstance(one, Tensor) else float(one) for one in numbers]
    # The default device may be another one: a cell of the user's sets it.
    made = torch.tensor(plain, dtype=torch.float64, device="cpu").to(device, non_blocking=True)
    # Those on the device stay there; all numbers of Python cross in one copy, not waited for.
    tensors = [one.reshape(()) for one in numbers if isinstance(one, Tensor)]
    if not tensors:
        return made
    there = torch.stack([one.to(device, torch.float64) for one in tensors])
    where = [i for i, one in enumerate(numbers) if isinstance(one, Tensor)]
    places = torch.tensor(where, device="cpu").to(device, non_blocking=True)
    return made.index_copy_(0, places, there)
