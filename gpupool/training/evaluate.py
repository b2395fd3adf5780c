"""Loss and metrics of a network on a data set, by the ranks that train. Runs on the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpupool.core.jobs import InferenceJob
from gpupool.core.options.model_facts import chosen_loss
from gpupool.core.options.named_measures import check_loss, check_metrics
from gpupool.core.wire.calls import Evaluate
from gpupool.pool.pool import Pool
from gpupool.training.call import ask, inference_options
from gpupool.training.inputs import with_targets

if TYPE_CHECKING:
    from torch import nn


def evaluate(
    model: nn.Module,
    dataset: Any,
    metrics: Any = ("accuracy",),
    *,
    loss: Any = None,
    batch_size: int = 256,
    precision: str = "float32",
    pool: Pool | None = None,
    **reading: Any,
) -> dict[str, float]:
    """The metrics of `model` over all samples, and its loss if one is given, by name.

    They do not depend on the number of ranks, nor on `batch_size`: each sample counts once, and
    what the ranks have seen is put together before a value is computed.

    Args:
        metrics: names ("accuracy", "top5", "precision", "recall", "f1", "auc", "pixel_accuracy",
            "mean_iou", "rmse", "mse", "mae", "r2", "token_accuracy", "perplexity"; those of classes
            are means over the classes, as scikit-learn's "macro"), functions (outputs, targets) ->
            mean over the samples, metrics of torchmetrics, or a dict {name of an output: one or
            several of these}. Pixels of class -100 count nowhere.
        loss: as for `train`.
        batch_size: samples per step over all ranks.
        precision: "float32", or "bf16" or "fp16" by `torch.autocast`.
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: options of `TrainingOptions` that say how samples are read.

    Raises:
        TrainingError: the input is not a network or not a data set, or a metric is unknown.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    check_metrics(metrics)
    if loss is not None:
        check_loss(loss)
    dataset = with_targets(dataset, model)
    options = inference_options("evaluate", batch_size=batch_size, precision=precision, **reading)
    loss = chosen_loss(loss, model)
    job = InferenceJob(model, dataset, options, metrics, loss)
    # All ranks have summed the same over all samples, so the first one's values are everybody's.
    return dict(ask("evaluate", pool, job, Evaluate)[0])
