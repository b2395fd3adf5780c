"""The losses and metrics that have a name, and the error for a wrong one. Runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpupool.core.errors import TrainingError
from gpupool.core.options.checks import suggest

LOSSES = {  # name -> class of torch.nn
    "cross_entropy": "CrossEntropyLoss",
    "nll": "NLLLoss",
    "mse": "MSELoss",
    "mae": "L1Loss",
    "huber": "HuberLoss",
    "smooth_l1": "SmoothL1Loss",
    "bce_with_logits": "BCEWithLogitsLoss",
}
CLASS_METRICS = (
    *("accuracy", "top5", "precision", "recall", "f1", "auc"),
    *("pixel_accuracy", "mean_iou"),
)
METRICS = (*CLASS_METRICS, "rmse", "mse", "mae", "r2", "token_accuracy", "perplexity")

# Of these less is better; of all others more.
_LESS_IS_BETTER = ("loss", "error", "mse", "rmse", "mae", "huber", "perplexity", "deviation")


def check_loss(loss: object) -> None:
    """Raise TrainingError, with what there is, if `loss` is not one; see `train`."""
    if loss not in ("auto", "output", None):
        also = "'output' (what the network gives as its loss), and any function"
        _check("loss", loss, LOSSES, f"{also} (outputs, targets) -> mean")


def check_metrics(metrics: object) -> None:
    """Raise TrainingError, with what there is, if `metrics` are none; see `evaluate`."""
    also = "any function (outputs, targets) -> mean, and the metrics of torchmetrics"
    for metric in listed(metrics):
        _check("metrics", metric, METRICS, also)


def _check(option: str, value: object, known: Iterable[str], also: str) -> None:
    if isinstance(value, type):
        name = value.__name__
        raise TrainingError(f"{option}={name} is a class; pass an instance: {name}(...).")
    if not callable(value) and value not in [*known]:  # it may have no hash
        raise TrainingError(
            f"{option}={value!r} is unknown. {suggest(str(value), known)} Also {also}."
        )


def listed(metrics: Any) -> list[Any]:
    """All metrics of a name, a function, a sequence or a dict {output: one or several of them}."""
    # A string is iterable, and so is each of its characters: walking into it would never end.
    if isinstance(metrics, str | None) or not isinstance(metrics, Iterable):
        return [metrics]
    if hasattr(metrics, "compute"):  # a MetricCollection, which is a dict too
        return [metrics]
    parts = metrics.values() if isinstance(metrics, Mapping) else metrics
    return [metric for part in parts for metric in listed(part)]


def name_of(metric: str | Callable[..., Any]) -> str:
    """What its values are called.

    >>> name_of("f1"), name_of(max)
    ('f1', 'max')
    """
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "__name__", None) or type(metric).__name__)


def less_is_better(name: str) -> bool:
    """Whether a smaller value is a better one, by its name.

    >>> less_is_better("val_loss"), less_is_better("accuracy")
    (True, False)
    """
    return name.lower().endswith(_LESS_IS_BETTER)
