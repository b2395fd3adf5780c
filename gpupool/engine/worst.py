"""The samples of a data set with the highest losses, as small pictures too. Runs on engines.

worst = Worst(16, loss, scaling, is_binary=False)
worst.add(outputs, share, indices)  # of each share that has samples
worst.found()                       # this rank's; the client chooses among those of all ranks
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.core.wire.replies import WorstSample
from gpupool.data.reading.trees import rows, tensors
from gpupool.engine.batches.share import Scaling, Share
from gpupool.engine.metrics.named import classes
from gpupool.engine.numerics.class_loss import fits_first, fits_last
from gpupool.engine.numerics.losses import Loss

# (order, -index, what is reported, the picture): a heap has the least of them first
_Kept = tuple[float, int, WorstSample, Tensor | None]


class Worst:
    """The `num` samples with the highest loss of those that were added.

    Args:
        scaling: the normalization of the inputs, which pictures are freed from.
        is_binary: whether one output stands for two classes.
    """

    def __init__(self, num: int, loss: Loss, scaling: Scaling | None, *, is_binary: bool) -> None:
        self._num, self._loss, self._scaling, self._is_binary = num, loss, scaling, is_binary
        self._kept: list[_Kept] = []

    def add(self, outputs: Any, share: Share, indices: Sequence[int]) -> None:
        """Look at the samples of a share, which have these indices in the data set."""
        losses = sample_losses(self._loss, outputs, share.targets, share.num_here)
        order = [math.inf if math.isnan(loss) else loss for loss in losses]
        # Equal losses: the first sample in the data set stays, on any number of ranks.
        chosen = heapq.nsmallest(self._num, range(len(order)), key=lambda n: (-order[n], n))
        pixels = image_of(share.inputs)
        for n in chosen:
            place = (order[n], -int(indices[n]))
            if len(self._kept) == self._num and place <= self._kept[0][:2]:
                break  # those that follow have lower losses still
            found, true = self._said(outputs, share.targets, n, share.num_here)
            sample = WorstSample(int(indices[n]), losses[n], found, true)
            picture = None if pixels is None else _shown(pixels[n], self._scaling)
            kept = (*place, sample, picture)
            if len(self._kept) < self._num:
                heapq.heappush(self._kept, kept)
            else:
                heapq.heapreplace(self._kept, kept)

    def found(self) -> list[tuple[WorstSample, Tensor | None]]:
        """The samples, the one with the highest loss first, each with its picture: uint8 (C, H, W),
        or None of a sample that is no image."""
        return [(sample, picture) for *_, sample, picture in sorted(self._kept, reverse=True)]

    def _said(self, outputs: Any, targets: Any, n: int, num: int) -> tuple[Any, Any]:
        """What the network found for a sample, and what is true; None of more than one number."""
        scores, labels = self._loss.scored(
            rows(outputs, n, n + 1, num), rows(targets, n, n + 1, num)
        )
        if not (isinstance(scores, Tensor) and isinstance(labels, Tensor)) or labels.numel() != 1:
            return None, None
        is_number = scores.numel() == 1
        is_scored = fits_first(scores, labels) or fits_last(scores, labels)
        if (self._is_binary and is_number) or (is_scored and not labels.is_floating_point()):
            predicted, actual, _ = classes(scores, labels)
            return int(predicted), int(actual)
        return (float(scores), float(labels)) if is_number else (None, None)


def sample_losses(loss: Loss, outputs: Any, targets: Any, num: int) -> list[float]:
    """The loss of each sample of a batch, as if it were a batch of its own.

    That is right for any loss that is a mean over samples; weights of classes have no effect.

    Raises TrainingError where a sample cannot be cut out of the batch.
    """
    found = []
    for n in range(num):
        try:
            parts = rows(outputs, n, n + 1, num), rows(targets, n, n + 1, num)
        except ValueError as error:
            raise TrainingError(
                f"worst needs the loss of each sample, and these cannot be distinguished: {error}; "
                "give a loss of single samples, as worst(16, loss='cross_entropy')."
            ) from None
        found.append(loss(*parts).double().sum())
    # All at once: each number that is read from a GPU waits for what is queued there.
    return torch.stack(found).tolist() if found else []


def image_of(inputs: Any) -> Tensor | None:
    """The images (N, 1 or 3, H, W) among the inputs of a network; None if there are none."""
    are_images = (
        one for one in tensors(inputs) if one.ndim == 4 and one.shape[1] in (1, 3) and one.numel()
    )
    return next(are_images, None)


def _shown(image: Tensor, scaling: Scaling | None) -> Tensor:
    """One image as uint8 on the CPU, as it was before it was normalized."""
    image = image.detach().to("cpu", torch.float32)
    if scaling is not None:
        mean, std = (one.to("cpu", torch.float32).view(-1, 1, 1) for one in scaling)
        image = image * std + mean
    image = image.nan_to_num()
    low, high = float(image.min()), float(image.max())
    # Numbers that are no shares of white (a normalization that nobody knows): darkest to lightest.
    if low < -0.01 or high > 1.01:
        image = (image - low) / max(high - low, 1e-12)
    return image.clamp(0, 1).mul(255).round().to(torch.uint8)


def own_scaling(dataset: Any) -> Scaling | None:
    """The normalization by torchvision's `Normalize` at the end of a data set's transform."""
    while dataset is not None:
        for parts in (getattr(dataset, name, None) for name in ("transform", "transforms")):
            steps = getattr(parts, "transforms", [parts])
            last: Any = steps[-1] if isinstance(steps, (list, tuple)) and steps else None
            if type(last).__name__ == "Normalize":
                return torch.tensor(last.mean), torch.tensor(last.std)
        within = getattr(dataset, "datasets", None)
        dataset = within[0] if within else getattr(dataset, "dataset", None)
    return None
