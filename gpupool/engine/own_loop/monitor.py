"""`gpupool.monitor`: the progress of a loop of one's own. Runs on engines, and under torchrun.

    with gpupool.monitor(["loss", "accuracy"], num_steps=500) as monitor:
        for step in range(1, 501):
            ...
            monitor.record(step, weight=batch.num_here, loss=loss, accuracy=share_that_is_right)
            if monitor.stop:       # true on all ranks after the same step
                break

Values stay on the device and are summed over the ranks a block of records at a time; the wish to
stop travels in the same all-reduce, and so does the first rank's opinion on how many records the
next block should have.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from gpupool.core.errors import OptionsError
from gpupool.core.monitor_lines import MonitorLines
from gpupool.core.wire.events import MonitorEvent, Row
from gpupool.engine import control
from gpupool.engine.group.forming import World
from gpupool.engine.output.emit import emit
from gpupool.engine.own_loop.sharding import world_of

REPORT_EVERY_S = 0.5
MAX_BLOCK = 1000  # records between two reports at most

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Record:
    step: int
    elapsed_s: float
    weight: float | Tensor
    values: Mapping[str, float | Tensor]


class Monitor:
    """Made by `gpupool.monitor`, which says what its arguments are."""

    def __init__(
        self,
        world: World,
        metrics: Sequence[str],
        num_steps: int,
        title: str,
        report_every: int | None,
        emit: Callable[[MonitorEvent], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._world, self._emit, self._clock = world, emit, clock
        self._metrics, self._num_steps, self._title = tuple(metrics), num_steps, title
        self._report_every = report_every
        self._groups: dict[str, list[str]] = {}
        self._info: dict[str, str] = {}
        self._number = next(_numbers)
        self._began = self._reported_at = clock()
        self._records: list[_Record] = []
        self._block = report_every or 1  # records until the next report
        self._wish = self._stopped = self._heeds_stop = self._closed = False

    @property
    def stop(self) -> bool:
        """Whether the loop is to end: the same on all ranks after each record.

        The first press of the notebook's stop button ends a loop that asks this; any other loop it
        interrupts.
        """
        self._heeds_stop = True
        return self._stopped

    def record(self, step: int, *, weight: float | Tensor = 1.0, **values: float | Tensor) -> None:
        """Note values of a step; every rank has to do it, as often as the others.

        What is shown is the mean over the ranks, each counted `weight` times: with the number of
        its samples, the mean over the whole batch. Not every metric has to be there every time.
        Tensors of one number are not read before the next report.

        Raises:
            OptionsError: a metric that `gpupool.monitor` does not know.
        """
        self._require_known(values)
        # Detached: the graph of each step would stay alive until the report.
        kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
        self._records.append(_Record(step, self._clock() - self._began, weight, kept))
        # Both are the same on all ranks, so all report after the same record.
        if len(self._records) >= self._block or step == self._num_steps or self._is_late():
            self._report()

    def request_stop(self) -> None:
        """Wish to stop, on any rank: `stop` becomes true on all, after the next report."""
        self._wish = True

    def group(self, title: str, metrics: Sequence[str]) -> None:
        """Have metrics drawn in one plot.

        Raises:
            OptionsError: a metric that `gpupool.monitor` does not know.
        """
        self._require_known(metrics)
        self._groups[title] = list(metrics)

    def info(self, **facts: object) -> None:
        """Show facts beside the plots, such as `info(epoch=3)`: those of the first rank."""
        self._info |= {name: str(fact) for name, fact in facts.items()}

    def close(self) -> None:
        """Report what is left; every rank has to do it. The end of a `with` block does it."""
        if self._closed:
            return
        self._closed = True
        rows = self._summed() if self._records else []
        self._send("stopped" if self._stopped else "finished", rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Another rank may not reach its end of the block at all.
            self._closed = True  # without the sums: other ranks may be elsewhere
            self._send("failed", [])

    def begin(self) -> None:
        """Show that there is a loop."""
        self._send("running", [])

    # ---- inside --------------------------------------------------------------------------

    def _report(self) -> None:
        rows = self._summed()
        self._send("stopping" if self._stopped else "running", rows)

    def _summed(self) -> list[Row]:
        """The records since the last report with their means over the ranks; agrees on the stop."""
        records, self._records = self._records, []
        sums, counts = _weighed(records, self._metrics, self._world.device)
        wish = float(self._wish or control.stop_requested())
        block = self._next_block(len(records))
        # One all-reduce for everything: the sums, the wish to stop, and the first rank's block.
        tail = torch.tensor([wish, block], dtype=torch.float64, device="cpu")
        numbers = torch.cat([sums.flatten(), counts.flatten(), tail.to(sums.device)])
        *flat, wishes, block = self._world.sum(numbers).tolist()
        self._stopped |= wishes > 0
        self._block, self._reported_at = int(block), self._clock()
        half, width = len(flat) // 2, len(self._metrics)
        means = [s / c if c else None for s, c in zip(flat[:half], flat[half:], strict=True)]
        return [
            (one.step, one.elapsed_s, _present(self._metrics, means[n * width : (n + 1) * width]))
            for n, one in enumerate(records)
        ]

    def _is_late(self) -> bool:
        """Whether steps have become slow meanwhile: only a rank that is alone may ask its clock."""
        is_alone = self._world.size == 1 and self._report_every is None
        return is_alone and self._clock() - self._reported_at >= REPORT_EVERY_S

    def _next_block(self, num_records: int) -> int:
        """How many records the next block has: the first rank says, for the others 0 is added."""
        # Clocks of ranks differ, and all have to report after the same record.
        if self._world.rank != 0:
            return 0
        if self._report_every is not None:
            return self._report_every
        record_s = (self._clock() - self._reported_at) / num_records
        return max(1, min(MAX_BLOCK, round(REPORT_EVERY_S / max(record_s, 1e-9))))

    def _send(self, status: str, rows: list[Row]) -> None:
        if self._world.rank != 0:
            return
        self._emit(
            MonitorEvent(
                number=self._number,
                title=self._title,
                num_steps=self._num_steps,
                world_size=self._world.size,
                groups=self._all_groups(),
                info=dict(self._info),
                status=status,
                heeds_stop=self._heeds_stop,
                elapsed_s=self._clock() - self._began,
                rows=rows,
            )
        )

    def _all_groups(self) -> dict[str, list[str]]:
        """The plots: those asked for, and one for each metric that is in none."""
        grouped = {name for names in self._groups.values() for name in names}
        return self._groups | {name: [name] for name in self._metrics if name not in grouped}

    def _require_known(self, names: Sequence[str] | Mapping[str, object]) -> None:
        for name in names:
            if name not in self._metrics:
                known = ", ".join(map(repr, self._metrics))
                raise OptionsError(
                    f"{name!r} is no metric of this monitor, which has {known}; name it in "
                    "gpupool.monitor(metrics=[...])."
                )


def monitor(
    metrics: Sequence[str] = ("loss",),
    *,
    num_steps: int = 0,
    title: str = "Training",
    groups: Mapping[str, Sequence[str]] | None = None,
    report_every: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Monitor:
    """Show the progress of a loop of one's own: plots below the cell, lines in a terminal.

    Every rank makes one, with the same arguments. Under torchrun rank 0 writes lines on stderr.

    Args:
        metrics: the names that `record` may be given.
        num_steps: how many steps there will be, if that is known.
        groups: title of a plot -> the metrics in it; those in none have one each.
        report_every: records between two reports; None: as many as take about half a second.
        group: the ranks that take part; all unless given.

    Raises:
        OptionsError: an argument that makes no sense.
    """
    if isinstance(metrics, str) or not metrics:
        raise OptionsError.of("metrics", metrics, 'give a list of names, such as ["loss"].')
    if num_steps < 0:
        raise OptionsError.of("num_steps", num_steps, "must not be negative; 0 means unknown.")
    if report_every is not None and report_every < 1:
        raise OptionsError.of("report_every", report_every, "must be at least 1.")
    control.clear_stop()
    made = Monitor(world_of(group), metrics, num_steps, title, report_every, _way_out())
    for name, members in (groups or {}).items():
        made.group(name, members)
    made.begin()
    return made


def _way_out() -> Callable[[MonitorEvent], None]:
    """To the notebook, from a cell on a pool; elsewhere to stderr."""
    return (lambda event: emit([event])) if _is_engine() else MonitorLines(sys.stderr)


def _is_engine() -> bool:
    """Whether this process is an engine, and not one that an engine has started."""
    if "GPUPOOL_RANK" not in os.environ:
        return False
    from IPython.core.getipython import get_ipython

    return get_ipython() is not None


def _weighed(
    records: Sequence[_Record], metrics: Sequence[str], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(value * weight, weight) of each record and metric, float64 of shape (records, metrics).

    Both are 0 where there is no value, or where it counts nothing.
    """
    flat = [one.values.get(name, 0.0) for one in records for name in metrics]
    # A table with holes as 0: so any number of metrics is two tensors and no loop on the device.
    values = _on_device(flat, device).view(len(records), len(metrics))
    weights = _on_device([one.weight for one in records], device).unsqueeze(1)
    has = [[name in one.values for name in metrics] for one in records]
    present = torch.tensor(has, device="cpu")  # a cell may set another default
    counts = weights * present.to(device, torch.float64)
    # 0 times NaN is NaN: where nothing is counted, the value does not matter
    return torch.where(counts > 0, values * counts, 0.0), counts


def _on_device(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers as one float64 tensor; those that are on the device are not read."""
    is_tensor = [isinstance(one, Tensor) for one in numbers]
    plain = [0.0 if isinstance(one, Tensor) else float(one) for one in numbers]
    made = torch.tensor(plain, dtype=torch.float64, device="cpu").to(device)
    # Those on the device stay there; all numbers of Python cross in one copy.
    tensors = [one.reshape(()) for one in numbers if isinstance(one, Tensor)]
    if tensors:
        where = torch.tensor(is_tensor, device="cpu").nonzero().flatten().to(device)
        made[where] = torch.stack([one.to(device, torch.float64) for one in tensors])
    return made


def _present(metrics: Sequence[str], means: Sequence[float | None]) -> dict[str, float]:
    return {name: mean for name, mean in zip(metrics, means, strict=True) if mean is not None}
