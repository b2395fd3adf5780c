"""The samples on which a network has the highest losses. Runs on the client; draws nothing."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError
from gpupool.core.network import info_of
from gpupool.core.options.datasets import class_names, is_stream
from gpupool.core.options.model_facts import chosen_loss
from gpupool.core.options.named_measures import LOSSES
from gpupool.data.datastores.preview import Picture, Preview
from gpupool.training.inputs import with_targets
from gpupool.training.predict import job_of, main_output, outputs_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpupool.pool.pool import Pool

_SIDE = 128  # pixels of the longer side of a small picture, at most


class WorstSamples(Preview):
    """Samples with the highest losses, the highest first: pictures in a notebook, else a table.

    `indices` are their places in the data set, `losses` their losses. The label of each says what
    was found and what is true.
    """

    indices: list[int]
    losses: list[float]

    def __repr__(self) -> str:
        lines = [f"{' '.join(one.label.split())}  {one.url}".rstrip() for one in self]
        return "\n  ".join([self.title, *lines])


def worst_samples(
    model: nn.Module,
    dataset: Any,
    num: int,
    loss: Any = "auto",
    pool: Pool | None = None,
    **reading: Any,
) -> WorstSamples:
    """The `num` samples of a data set with the highest loss; see `TrainingResult.worst`."""
    from torch import nn

    dataset, loss = with_targets(dataset, model), chosen_loss(loss, model)
    of_torch = getattr(nn, LOSSES[loss])() if isinstance(loss, str) and loss in LOSSES else loss
    if is_stream(dataset) or not hasattr(of_torch, "reduction"):
        raise TrainingError(
            "worst needs samples with an index, and a loss of torch for each: give these, as "
            "result.worst(16, dataset=data, loss='cross_entropy')."
        )
    job = job_of("worst", model, dataset, reading, loss=loss, keeps_targets=True)
    outputs, targets = outputs_of(job, pool)
    outputs = main_output(outputs)
    are_scores = outputs.ndim > 1 and outputs.shape[1] > 1 and not targets.is_floating_point()
    targets = targets.long() if are_scores else targets.to(outputs.dtype).view_as(outputs)
    of_each = copy.copy(of_torch)
    of_each.reduction = "none"
    losses = of_each(outputs, targets).double().reshape(len(targets), -1).mean(1)
    # NaN is before all others, and of equal losses the first sample.
    order = losses.argsort(descending=True, stable=True)[:num]
    found = outputs[order].argmax(1) if are_scores else outputs[order]
    classes = info_of(model).classes or class_names(dataset) if are_scores else ()
    words = zip(_words(found, classes), _words(targets[order], classes), strict=True)
    pictures = [
        _picture(dataset, i, f"{said}\ntrue: {true}\nloss {losses[i]:.4g}, #{i}")
        for i, (said, true) in zip(order.tolist(), words, strict=True)
    ]
    worst = WorstSamples(pictures, f"samples with the highest loss: {len(order)}")
    worst.indices, worst.losses = order.tolist(), losses[order].tolist()
    return worst


def _words(values: Tensor, classes: tuple[str, ...]) -> list[str]:
    """Classes by their names, where they have some, or numbers; of several numbers their shape."""
    if values[:1].numel() != 1:
        return [str(tuple(values.shape[1:]))] * len(values)
    known = dict(enumerate(classes))
    return [known.get(value, f"{value:.4g}") for value in values.flatten().tolist()]


def _picture(dataset: Any, index: int, label: str) -> Picture:
    """A small picture of a sample, if it is an image."""
    import torch
    from PIL import Image

    url = dataset.name(index) if hasattr(dataset, "count_each_label") else ""  # a datastore of ours
    sample = dataset[index]
    image = sample[0] if isinstance(sample, (tuple, list)) else None
    if not isinstance(image, torch.Tensor) or image.ndim != 3 or image.shape[0] not in (1, 3):
        return Picture(b"", label, url, problem="no image")
    shares = image / 255 if image.dtype == torch.uint8 else image
    low, high = float(shares.min()), float(shares.max())
    if low < 0 or high > 1:  # no shares of white: from the darkest to the lightest
        shares = (shares - low) / max(high - low, 1e-12)
    pixels = shares.mul(255).round().byte().permute(1, 2, 0).squeeze(2).numpy()
    picture, file = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((_SIDE, _SIDE))
    picture.save(file, "PNG")
    return Picture(file.getvalue(), label, url, image.shape[2], image.shape[1])
