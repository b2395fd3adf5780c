"""One transform of image and mask together. Runs anywhere; imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchvision import tv_tensors

from gpupool.core.errors import DataError
from gpupool.data.reading.samples import apply_transform


def transformed(
    transform: Callable[[Any, Any], Any] | None, name: str, image: torch.Tensor, mask: torch.Tensor
) -> tuple[Any, Any]:
    """Image and mask after `transform(image, mask)`, which gets tv_tensors; plain tensors come out.

    `name` is the image's, for what the transform raises.

    Raises DataError if it does not give a pair.
    """
    if transform is None:
        return image, mask
    # By their types torchvision v2 moves both alike, and changes colours of the image alone.
    made = apply_transform(transform, name, tv_tensors.Image(image), tv_tensors.Mask(mask))
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise DataError(
            f"the transform gave {type(made).__name__}; a transform of image and mask must give "
            "a pair (image, mask)",
            "type",
        )
    first, second = (
        one.as_subclass(torch.Tensor) if isinstance(one, tv_tensors.TVTensor) else one
        for one in made
    )
    return first, second


def laid_over(image: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The image with a colour for each class laid over it, and the mask; class 0 stays as it is."""
    # Steps of the golden ratio, far apart for neighbours.
    hue = (mask.clamp(min=0) * 0.618034) % 1.0 * 6.0
    wheel = (hue + torch.tensor([5.0, 3.0, 1.0])[:, None, None]) % 6.0
    colour = 255 * (1 - torch.minimum(wheel, 4 - wheel).clamp(0, 1))
    return torch.where(mask > 0, (0.5 * image + 0.5 * colour).to(torch.uint8), image), mask
