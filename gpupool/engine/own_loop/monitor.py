"""`gpupool.monitor`: the progress of a loop of one's own. Runs on engines, and under torchrun.

Values stay on the device and are summed over the ranks a block of records at a time (`Sums`); the
wish to stop travels in the same all-reduce.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch.distributed as dist
from torch import Tensor

from gpupool.core.errors import OptionsError
from gpupool.core.monitor_lines import MonitorLines
from gpupool.core.wire.events import MonitorEvent, Row
from gpupool.engine import control
from gpupool.engine.group.forming import World
from gpupool.engine.group.sums import Sums
from gpupool.engine.output.emit import emit
from gpupool.engine.own_loop.sharding import world_of
from gpupool.engine.shell import this_shell

REPORT_EVERY_S = 0.5
MAX_BLOCK = 1000  # records between two reports at most

_numbers = itertools.count(1)


class Monitor:
    """Made by `gpupool.monitor`."""

    def __init__(
        self,
        world: World,
        metrics: Sequence[str],
        num_steps: int,
        title: str,
        groups: Mapping[str, Sequence[str]],
        emit: Callable[[MonitorEvent], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._world, self._emit, self._clock = world, emit, clock
        self._metrics, self._num_steps, self._title = tuple(metrics), num_steps, title
        grouped = [name for members in groups.values() for name in members]
        self._require_known(grouped)
        self._groups = {title: list(members) for title, members in groups.items()}
        self._groups |= {name: [name] for name in self._metrics if name not in grouped}
        self._info: dict[str, str] = {}
        self._number = next(_numbers)
        self._began = clock()
        self._sums = Sums(world, REPORT_EVERY_S, MAX_BLOCK, clock)
        self._records: list[Row] = []  # since the last report, without their means
        self._wish = self._stopped = self._heeds_stop = self._closed = False
        self._send("running", [])  # there is a loop

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
        self._sums.add([(kept[k], weight) if k in kept else (0.0, 0.0) for k in self._metrics])
        self._records.append((step, self._clock() - self._began, {}))
        # All are the same on all ranks, so all report after the same record.
        if self._sums.is_full or step == self._num_steps:
            self._report("running")

    def request_stop(self) -> None:
        """Wish to stop, on any rank: `stop` becomes true on all, after the next report."""
        self._wish = True

    def info(self, **facts: object) -> None:
        """Show facts beside the plots, such as `info(epoch=3)`: those of the first rank."""
        self._info |= {name: str(fact) for name, fact in facts.items()}

    def close(self) -> None:
        """Report what is left; every rank has to do it. The end of a `with` block does it."""
        if not self._closed:
            self._closed = True
            self._report("finished")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._send("failed", [])  # without the sums: other ranks may never come here

    def _report(self, status: str) -> None:
        records, self._records = self._records, []
        rows: list[Row] = []
        if records:
            self._sums.begin(float(self._wish or control.stop_requested()))
            sums, (wishes,) = self._sums.finish()
            self._stopped |= wishes > 0
            for (step, elapsed_s, _), row in zip(records, sums, strict=True):
                pairs = zip(self._metrics, row, strict=True)
                means = {name: total / weight for name, (total, weight) in pairs if weight}
                rows.append((step, elapsed_s, means))
        if self._stopped:
            status = "stopping" if status == "running" else "stopped"
        self._send(status, rows)

    def _send(self, status: str, rows: list[Row]) -> None:
        if self._world.rank != 0:
            return
        self._emit(
            MonitorEvent(
                number=self._number,
                title=self._title,
                num_steps=self._num_steps,
                world_size=self._world.size,
                groups=self._groups,
                info=dict(self._info),
                status=status,
                heeds_stop=self._heeds_stop,
                elapsed_s=self._clock() - self._began,
                rows=rows,
            )
        )

    def _require_known(self, names: Sequence[str] | Mapping[str, object]) -> None:
        for name in set(names).difference(self._metrics):
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
    group: dist.ProcessGroup | None = None,
) -> Monitor:
    """Show the progress of a loop of one's own: plots below the cell, lines in a terminal.

    Every rank makes one, with the same arguments. Under torchrun rank 0 writes lines on stderr.

    Args:
        metrics: the names that `record` may be given.
        num_steps: how many steps there will be, if that is known.
        groups: title of a plot -> the metrics in it; those in none have one each.
        group: the ranks that take part; all unless given.

    Raises:
        OptionsError: an argument that makes no sense.
    """
    if isinstance(metrics, str) or not metrics:
        raise OptionsError(f'metrics={metrics!r}: give a list of names, such as ["loss"].')
    if num_steps < 0:
        raise OptionsError(f"num_steps={num_steps}: must not be negative; 0 means unknown.")
    control.clear_stop()
    return Monitor(world_of(group), metrics, num_steps, title, groups or {}, _way_out())


def _way_out() -> Callable[[MonitorEvent], None]:
    """To the notebook, from a cell on a pool; elsewhere to stderr."""
    # without a shell this is a process that an engine has started
    if "GPUPOOL_RANK" in os.environ and this_shell() is not None:
        return lambda event: emit([event])
    return MonitorLines(sys.stderr)
