"""From a mask file to the class of each pixel. Runs anywhere; imports torch only to decode.

    classes = MaskClasses.of({"road": 7, "car": [26, 27]})   # ids, as in a grey or palette PNG
    classes = MaskClasses.of({"road": (128, 64, 128)})       # colours, as in an RGB one
    decode_mask(data, "s3://bucket/1.png", classes)          # int16 tensor (height, width)

Pixels of no class are -100, which torch's cross_entropy leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import NO_CLASS

if TYPE_CHECKING:
    import torch
    from PIL import Image

# Pillow's modes of one channel, and of one with alpha, which means nothing in a mask.
_GREY_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "LA", "PA")
NUM_IDS = 2**16
_NUM_COLOURS = 2**24


@dataclass(frozen=True)
class MaskClasses:
    """What the pixels of masks mean: of each id or colour the index of its class.

    Colours are numbers 0xRRGGBB. With `kind` "as is" pixels are class ids already, and the classes
    have no names.
    """

    kind: str
    names: tuple[str, ...] = ()
    meaning: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, classes: Mapping[str, Any] | None) -> MaskClasses:
        """From names to ids (an int or a list of them) or to colours (a tuple of red, green and
        blue, or a list of such tuples); None: pixels are ids already.

        Raises OptionsError for anything else, and for an id or colour of two classes.
        """
        if classes is None:
            return cls("as is")
        listed = list(classes.values()) if isinstance(classes, Mapping) else []
        pairs = [
            (one, place)
            for place, value in enumerate(listed)
            for one in (value if isinstance(value, list) else [value])
        ]
        kinds = {_kind_of(one) for one, _ in pairs}
        if kinds not in ({"ids"}, {"colours"}) or [] in listed:
            raise OptionsError(
                f"classes={classes!r} must map each name to an id in 0..65535, or each to a colour "
                "(red, green, blue) in 0..255, or to a list of several; or be None"
            )
        ((most, number),) = Counter(one for one, _ in pairs).most_common(1)
        if number > 1:
            raise OptionsError(f"classes= gives {most} to two classes; give it to one")
        meaning = ((int.from_bytes(o) if isinstance(o, tuple) else o, place) for o, place in pairs)
        return cls(kinds.pop(), tuple(classes), tuple(meaning))

    def among(self, names: Sequence[str]) -> MaskClasses:
        """The same pixels, with the indices of these names.

        Raises OptionsError if they lack one of ours, or pixels hold the indices.
        """
        lacking = [name for name in self.names if name not in names]
        if lacking or self.kind == "as is":
            own = ", ".join(lacking) or "no names; pixels hold the indices"
            raise OptionsError(
                f"the masks have {own}, and classes={list(names)!r} does not hold that"
            )
        meaning = ((value, names.index(self.names[place])) for value, place in self.meaning)
        return MaskClasses(self.kind, tuple(names), tuple(meaning))


@lru_cache(maxsize=4)
def _table(classes: MaskClasses) -> NDArray[np.int16]:
    """From each possible value to its class: 32 MiB for colours, once in a process."""
    table = np.full(NUM_IDS if classes.kind == "ids" else _NUM_COLOURS, NO_CLASS, np.int16)
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
    if classes.kind != "as is":
        return torch.from_numpy(_table(classes)[values])
    # int16 holds ids of 8 bits, but not all of 16.
    return torch.from_numpy(values.astype(np.int16 if values.dtype.itemsize == 1 else np.int32))


def _values(image: Image.Image, classes: MaskClasses) -> NDArray[Any]:
    """The ids or colours of the pixels, as integers."""
    if classes.kind == "colours":
        red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), np.int32), -1, 0)
        joined: NDArray[np.int32] = red << 16 | green << 8 | blue
        return joined
    if image.mode not in _GREY_MODES:
        raise ValueError(
            f"it is a colour image ({image.mode}); give classes= from names to colours, "
            "or store ids as a grey or palette PNG"
        )
    values = np.asarray(image.getchannel(0) if image.mode in ("LA", "PA") else image)
    # Of mode "1".
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    # Mode "I" has 32 bits: such an id would lie outside of the table.
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < NUM_IDS:
        raise ValueError("its ids are not in 0..65535")
    return values


def _kind_of(value: Any) -> str:
    parts = value if isinstance(value, tuple) and len(value) == 3 else (value,)
    below = 256 if parts is value else NUM_IDS
    # True and False are ints for Python, but nobody means them as ids.
    if not all(type(part) is int and 0 <= part < below for part in parts):
        return "neither"
    return "colours" if parts is value else "ids"
