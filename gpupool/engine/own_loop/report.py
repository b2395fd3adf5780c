"""`gpupool.report`: what a task tells the notebook while it runs. On ranks, and in the notebook."""

from __future__ import annotations

from typing import Any

from gpupool.core import current
from gpupool.core.errors import OptionsError


def report(step: int, **values: Any) -> None:
    """Tell the notebook numbers of this step, from a task of `pool.submit` or a trial of a sweep.

    They are in `future.reports`. A sweep draws them, and prunes by them.

    Args:
        step: that of the training, say; it grows.
        values: by name; numbers, or tensors of one number, which are read.

    Raises:
        Pruned: the sweep has decided that this trial is not worth its time. Let it pass.
        OptionsError: this is no task.
    """
    __tracebackhide__ = True
    heard = current.trial.get()
    if heard is None:
        raise OptionsError(
            "gpupool.report is for tasks (pool.submit, pool.map) and trials of gpupool.sweep; in "
            "a cell gpupool.monitor shows the course of a loop."
        )
    heard(int(step), {name: float(value) for name, value in values.items()})
