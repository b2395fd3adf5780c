"""`gpupool.train`: begin a training, show it, wait for it. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from gpupool.core.options import TrainingOptions
from gpupool.notebook.views import show_training
from gpupool.pool.session import current_pool
from gpupool.training.result import TrainingResult
from gpupool.training.run import TrainingRun

if TYPE_CHECKING:
    from torch import nn


@overload
def train(
    model: nn.Module,
    dataset: Any,
    loss: str | Callable[..., Any] = ...,
    options: TrainingOptions | None = ...,
    validation: Any = ...,
    wait: Literal[True] = ...,
) -> TrainingResult: ...
@overload
def train(
    model: nn.Module,
    dataset: Any,
    loss: str | Callable[..., Any] = ...,
    options: TrainingOptions | None = ...,
    validation: Any = ...,
    *,
    wait: Literal[False],
) -> TrainingRun: ...
def train(
    model: nn.Module,
    dataset: Any,
    loss: str | Callable[..., Any] = "cross_entropy",
    options: TrainingOptions | None = None,
    validation: Any = None,
    wait: bool = True,
) -> TrainingResult | TrainingRun:
    """Train a copy of `model` on all ranks of the pool and show how it goes.

    A pool is started if none runs. Stopping (the monitor's button, or the notebook's) ends training
    after the same step on every rank and keeps the network as it is then.

    Args:
        model: any module; it is left as it is.
        dataset: a datastore, or any map-style torch data set of (input, target) pairs. uint8 inputs
            become float32 in 0..1 on the device.
        loss: "cross_entropy", "mse", or a callable (outputs, targets) -> mean loss.
        options: how; `TrainingOptions()` if left out.
        validation: a data set whose loss and accuracy are computed after every epoch.
        wait: False returns the running `TrainingRun` at once (of an inline pool: when it is over).

    Raises:
        TrainingError: the input cannot be trained on; no rank has started.
        SpmdError: a rank failed.
    """
    options = options or TrainingOptions()
    pool = current_pool(create=True)
    run = TrainingRun(pool, model, dataset, loss, options, validation, show=show_training)
    return run.result() if wait else run
