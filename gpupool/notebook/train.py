"""`gpupool.train`: begin a training, show it, wait for it. Runs on the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from gpupool.core.options.fields import with_keywords
from gpupool.core.options.training_options import TrainingOptions, merged
from gpupool.core.wire.environ import note_use
from gpupool.notebook.cells.views import LineView
from gpupool.notebook.monitor.views import show_training
from gpupool.pool.session import current_pool
from gpupool.pool.variables.composite import value_of
from gpupool.spmd.cell import CellReport
from gpupool.training import doctor
from gpupool.training.job import check_input
from gpupool.training.result import TrainingResult
from gpupool.training.run import TrainingRun

if TYPE_CHECKING:
    from torch import nn


@overload
def train(
    model: nn.Module,
    dataset: Any,
    loss: Any = ...,
    options: TrainingOptions | None = ...,
    validation: Any = ...,
    wait: Literal[True] = ...,
    **keywords: Any,
) -> TrainingResult: ...
@overload
def train(
    model: nn.Module,
    dataset: Any,
    loss: Any = ...,
    options: TrainingOptions | None = ...,
    validation: Any = ...,
    *,
    wait: Literal[False],
    **keywords: Any,
) -> TrainingRun: ...
def train(
    model: nn.Module,
    dataset: Any,
    loss: Any = "auto",
    options: TrainingOptions | None = None,
    validation: Any = None,
    wait: bool = True,
    **keywords: Any,
) -> TrainingResult | TrainingRun:
    """Train a copy of `model` on all ranks of the pool and show how it goes.

    A pool is started if none runs. Stopping (the monitor's button, or the notebook's) ends training
    after the same step on every rank and keeps the best network or the last, as `options.keep`
    says. Where data do not come, it ends after the last complete step. A second interrupt ends it
    at once, and the network is lost, but for a checkpoint. What the ranks print meanwhile,
    callbacks for instance, comes below the picture; without waiting, `run.text(rank)` has it.

    Args:
        model: any module; it is left as it is.
        dataset: a datastore, or any data set of torch or Hugging Face: pairs (input, target), rows
            with named columns, or what the option `collate` makes a batch of. Parts may be tensors,
            dicts, lists and tuples; the network is called with them one by one, by name, or with
            all, as its `forward` asks for (see the option `inputs`). uint8 inputs become float32
            in 0..1 on the device. An IterableDataset has to give the same on every rank.
        loss: "auto": what the network gives itself if it takes `labels`, as networks of Hugging
            Face do, else "cross_entropy". "output" or None: what the network gives. Or "nll",
            "mse", "mae", "huber", "smooth_l1", "bce_with_logits"; a function (outputs, targets) ->
            mean over the samples, or (outputs, batch), see the option `targets`; or a loss of
            torch.nn with its class weights and `ignore_index`. Pixels and tokens of class -100
            count nowhere.
        options: how; `TrainingOptions()` if left out.
        keywords: single options by name, as `epochs=3`; they replace those of `options`.
        validation: a data set whose loss, accuracy and `metrics` are computed after every epoch.
        wait: False returns the running `TrainingRun` at once.

    Raises:
        OptionsError: an option is unknown, wrong, or would do nothing; no rank has started.
        TrainingError: the input cannot be trained on; no rank has started.
        SpmdError: a rank failed.
    """
    loss, options = merged(loss, options, keywords)
    dataset, validation = value_of(dataset), value_of(validation)
    check_input(model, dataset, loss, validation)  # before a pool is started for it
    # A pool that starts now has the keys for what it is to write, too.
    for url in (options.checkpoint, options.resume):
        note_use(url)
    pool = current_pool(create=True)
    prints: LineView | None = None

    def show(run: TrainingRun) -> None:
        nonlocal prints
        show_training(run, options.progress, waits=wait)
        if wait:
            prints = LineView(list(run.outputs), show_values=False)
            run.on_print = prints.on_output

    run = TrainingRun(pool, model, dataset, loss, options, validation, show=show)
    doctor.last = run.history
    if not wait:
        return run
    try:
        return run.result(tick=prints.tick if prints else lambda: None)
    finally:
        # Also after an error: what ranks printed before it is often what explains it.
        if prints is not None:
            prints.finish(CellReport(run.outputs, elapsed_s=run.history.elapsed_s))


train.__signature__ = with_keywords(train, TrainingOptions)  # type: ignore[attr-defined]
