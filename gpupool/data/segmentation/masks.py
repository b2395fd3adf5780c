"""From a mask file to the class of each pixel. Runs anywhere; imports torch only to decode.

    classes = MaskClasses.of({"road": 7, "car": [26, 27]})   # ids, as in a grey or palette PNG
    classes = MaskClasses.of({"road": (128, 64, 128)})       # colours, as in an RGB one
    decode_mask(data, "s3://bucket/1.png", classes)          # int16 tensor (height, width)

Pixels of no class are -100, which torch's cross_entropy leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.data.reading.samples import apply_transform

if TYPE_CHECKING:
    import torch
    from PIL import Image

# Pillow's modes of one channel, and of one with alpha, which means nothing in a mask.
_GREY_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "LA", "PA")
NUM_IDS = 2**16
_NUM_COLOURS = 2**24


@dataclass(frozen=True)
class MaskClasses:
    """What the pixels of masks mean: of each id or colour (0xRRGGBB) the index of its class.

    Without names, pixels are the indices themselves.
    """

    names: tuple[str, ...] = ()
    meaning: tuple[tuple[int, int], ...] = ()
    are_colours: bool = False

    @classmethod
    def of(cls, classes: Mapping[str, Any] | None) -> MaskClasses:
        """From names to ids (an int or a list of them) or to colours (a tuple of red, green and
        blue, or a list of such tuples); None: pixels are ids already.

        Raises OptionsError for anything else, and for an id or colour of two classes.
        """
        if classes is None:
            return cls()
        given = list(classes.values()) if isinstance(classes, Mapping) else []
        listed = [value if isinstance(value, list) else [value] for value in given]
        meaning = [(_number(one), place) for place, ones in enumerate(listed) for one in ones]
        numbers = [number for number, _ in meaning]
        kinds = {isinstance(one, tuple) for ones in listed for one in ones}
        is_odd = [] in listed or len(kinds) != 1 or -1 in numbers
        if is_odd or len(set(numbers)) < len(numbers):
            raise OptionsError(
                f"classes={classes!r} must map each name to an id in 0..65535, or each to a colour "
                "(red, green, blue) in 0..255, or to a list of several, and none to two; or be None"
            )
        return cls(tuple(classes), tuple(meaning), are_colours=kinds.pop())

    def among(self, names: Sequence[str]) -> MaskClasses:
        """The same pixels, with the indices of these names.

        Raises OptionsError if they lack one of ours, or pixels hold the indices.
        """
        lacking = [name for name in self.names if name not in names]
        if lacking or not self.names:
            own = ", ".join(lacking) or "no names; pixels hold the indices"
            raise OptionsError(
                f"the masks have {own}, and classes={list(names)!r} does not hold that"
            )
        meaning = ((value, names.index(self.names[place])) for value, place in self.meaning)
        return MaskClasses(tuple(names), tuple(meaning), self.are_colours)


@lru_cache(maxsize=4)
def _table(classes: MaskClasses) -> NDArray[np.int16]:
    """From each possible value to its class: 32 MiB for colours, once in a process."""
    table = np.full(_NUM_COLOURS if classes.are_colours else NUM_IDS, NO_CLASS, np.int16)
    for value, place in classes.meaning:
        table[value] = place
    return table


def decode_mask(data: bytes, name: str, classes: MaskClasses) -> torch.Tensor:
    """The class of each pixel: int16 tensor (height, width), int32 for masks of 16 bits as is.

    Pixels of no class are -100. Raises SampleError as `open_image`, and if the file has colours
    where ids are expected.
    """
    import torch

    from gpupool.data.reading.decode import open_image

    with open_image(data, name, "a mask") as image:
        values = _values(image, classes)
    if classes.names:
        return torch.from_numpy(_table(classes)[values])
    # int16 holds ids of 8 bits, but not all of 16.
    return torch.from_numpy(values.astype(np.int16 if values.dtype.itemsize == 1 else np.int32))


def _values(image: Image.Image, classes: MaskClasses) -> NDArray[Any]:
    """The ids or colours of the pixels, as integers."""
    if classes.are_colours:
        red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), np.int32), -1, 0)
        joined: NDArray[np.int32] = red << 16 | green << 8 | blue
        return joined
    if image.mode not in _GREY_MODES:
        raise ValueError(
            f"it is a colour image ({image.mode}); give classes= from names to colours, "
            "or store ids as a grey or palette PNG"
        )
    values = np.asarray(image.getchannel(0) if image.mode in ("LA", "PA") else image)
    if values.dtype.kind == "b":  # of mode "1"
        return values.astype(np.uint8)
    # Mode "I" has 32 bits: such an id would lie outside of the table.
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < NUM_IDS:
        raise ValueError("its ids are not in 0..65535")
    return values


def _number(value: Any) -> int:
    """An id, or a colour as 0xRRGGBB; -1 for what is neither."""
    is_colour = isinstance(value, tuple) and len(value) == 3
    parts, below = (value, 256) if is_colour else ((value,), NUM_IDS)
    # True and False are ints for Python, but nobody means them as ids.
    if not all(type(part) is int and 0 <= part < below for part in parts):
        return -1
    return int.from_bytes(value) if is_colour else int(value)


def transformed(
    transform: Callable[[Any, Any], Any] | None, name: str, image: torch.Tensor, mask: torch.Tensor
) -> tuple[Any, Any]:
    """Image and mask after `transform(image, mask)`, which gets tv_tensors; plain tensors come out.

    `name` is the image's, for what the transform raises. Raises DataError if it gives no pair.
    """
    if transform is None:
        return image, mask
    import torch
    from torchvision import tv_tensors

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
    import torch

    # Steps of the golden ratio, far apart for neighbours.
    hue = (mask.clamp(min=0) * 0.618034) % 1.0 * 6.0
    wheel = (hue + torch.tensor([5.0, 3.0, 1.0])[:, None, None]) % 6.0
    colour = 255 * (1 - torch.minimum(wheel, 4 - wheel).clamp(0, 1))
    return torch.where(mask > 0, (0.5 * image + 0.5 * colour).to(torch.uint8), image), mask
