"""The samples on which a network has the highest losses. Runs on the client; draws nothing."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import NONE
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.class_names import class_names
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.model_facts import chosen_loss
from gpupool.training.call import inference_options
from gpupool.training.inputs import with_targets
from gpupool.training.predict import main_output, outputs_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpupool.pool.pool import Pool

_SIDE = 128  # pixels of the longer side of a small picture, at most
# The names of losses -> torch's functions, where these have other names.
_FUNCTIONS = {
    "nll": "nll_loss",
    "mse": "mse_loss",
    "mae": "l1_loss",
    "huber": "huber_loss",
    "smooth_l1": "smooth_l1_loss",
    "bce_with_logits": "binary_cross_entropy_with_logits",
}


@dataclass(frozen=True)
class WorstSample:
    """A sample with a high loss: `index` is its place in the data set, `url` its file if one is
    known. `found` and `true` are names or indices of classes, or numbers; None of more than one.

    `png` is a small picture, b"" of what is no image; `width` and `height` are the image's own.
    """

    index: int
    loss: float
    found: Any
    true: Any
    url: str
    png: bytes
    width: int = 0
    height: int = 0

    @property
    def label(self) -> str:
        """What stands below its picture."""
        return f"{_word(self.found)}\ntrue: {_word(self.true)}\nloss {self.loss:.4g}, #{self.index}"

    @property
    def problem(self) -> str:
        """What stands in the place of a picture."""
        return "" if self.png else "no image"


class WorstSamples(tuple[WorstSample, ...]):
    """Samples with the highest losses, the highest first: pictures in a notebook, else a table."""

    @property
    def title(self) -> str:
        """The whole in one line."""
        return f"the {len(self)} sample{'s' if len(self) != 1 else ''} with the highest loss"

    @property
    def indices(self) -> list[int]:
        """Their places in the data set: `dataset[worst.indices[0]]` is the sample itself."""
        return [sample.index for sample in self]

    def __repr__(self) -> str:
        lines = [f"{' '.join(one.label.splitlines())}  {one.url}".rstrip() for one in self]
        return "\n  ".join([f"WorstSamples: {self.title}", *lines])


def worst_samples(
    model: nn.Module,
    dataset: Any,
    num: int,
    loss: Any = "auto",
    pool: Pool | None = None,
    **reading: Any,
) -> WorstSamples:
    """The `num` samples of a data set with the highest loss; see `TrainingResult.worst`."""
    dataset, loss = with_targets(dataset, model), chosen_loss(loss, model)
    each_loss = None if is_stream(dataset) else _each_loss(loss)
    if each_loss is None:
        raise TrainingError(
            "worst needs samples with an index, and a loss of torch for each: give these, as "
            "result.worst(16, dataset=data, loss='cross_entropy')."
        )
    options = inference_options("worst", **reading)
    job = InferenceJob(model, dataset, options, loss=loss, keeps_targets=True)
    outputs, targets = outputs_of("worst", job, pool)
    outputs = main_output(outputs)
    are_scores = outputs.ndim > 1 and outputs.shape[1] > 1 and not targets.is_floating_point()
    targets = targets.long() if are_scores else targets.to(outputs.dtype).view_as(outputs)
    losses = each_loss(outputs, targets).double().reshape(len(targets), -1).mean(1)
    # NaN is before all others, and of equal losses the first sample.
    order = losses.argsort(descending=True, stable=True)[:num]
    found = outputs[order].argmax(1) if are_scores else outputs[order]
    classes = info_of(model).classes or class_names(dataset) if are_scores else ()
    return WorstSamples(
        WorstSample(
            i, losses[i].item(), _named(f, classes), _named(t, classes), *_shown(dataset, i)
        )
        for i, f, t in zip(order.tolist(), found, targets[order], strict=True)
    )


def _each_loss(loss: Any) -> Any:
    """A function (outputs, targets) -> the loss of each sample, of a name or module of torch; None
    of any other."""
    from torch.nn import functional

    if isinstance(loss, str) and loss != "output":
        return partial(getattr(functional, _FUNCTIONS.get(loss, loss)), reduction="none")
    if not hasattr(loss, "reduction"):
        return None
    loss = copy.copy(loss)
    loss.reduction = "none"
    return loss


def _named(value: Tensor, classes: tuple[str, ...]) -> Any:
    """A class by its name, if it has one, or a number; None of a mask, say."""
    if value.numel() != 1:
        return None
    number = value.item()
    return classes[int(number)] if 0 <= number < len(classes) else number


def _shown(dataset: Any, index: int) -> tuple[str, bytes, int, int]:
    """The file of a sample, a small PNG of its image, and the image's own width and height."""
    import torch
    from PIL import Image

    url = dataset.name(index) if hasattr(dataset, "count_each_label") else ""  # a datastore of ours
    sample = dataset[index]
    image = sample[0] if isinstance(sample, (tuple, list)) else None
    if not isinstance(image, torch.Tensor) or image.ndim != 3 or image.shape[0] not in (1, 3):
        return url, b"", 0, 0
    if image.dtype != torch.uint8:
        low, high = image.min(), image.max()
        # Numbers that are no shares of white (normalized ones): from the darkest to the lightest.
        if low < 0 or high > 1:
            image = (image - low) / (high - low).clamp(min=1e-12)
        image = image.mul(255).round().byte()
    picture = Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
    width, height = picture.size
    picture.thumbnail((_SIDE, _SIDE))
    picture.save(file := io.BytesIO(), "PNG")
    return url, file.getvalue(), width, height


def _word(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:.4g}" if isinstance(value, float) else str(value)
