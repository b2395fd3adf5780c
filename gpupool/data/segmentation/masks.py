"""From a mask file to the class of each pixel. Runs anywhere; imports torch only to decode.

    classes = MaskClasses.of({"road": 7, "car": [26, 27]})   # ids, as in a grey or palette PNG
    classes = MaskClasses.of({"road": (128, 64, 128)})       # colours, as in an RGB one
    decode_mask(data, "s3://bucket/1.png", classes)          # int16 tensor (height, width)

Pixels of no class are -100, which torch's cross_entropy leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError

if TYPE_CHECKING:
    import torch
    from PIL import Image

NO_CLASS = -100  # what torch's cross_entropy leaves out by default
_Values = NDArray[Any]
# Pillow's modes of one channel, and of one with alpha, which means nothing in a mask.
_GREY_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "LA", "PA")
_NUM_IDS = 2**16
_NUM_COLOURS = 2**24


@dataclass(frozen=True)
class MaskClasses:
    """What the pixels of masks mean: `values[i]` is an id or a colour of class `places[i]`.

    Colours are numbers 0xRRGGBB. With `kind` "as is" pixels are class ids already, and the classes
    have no names.
    """

    kind: str
    names: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, classes: Mapping[str, Any] | None) -> MaskClasses:
        """From names to ids (an int or a list of them) or to colours (a tuple of red, green and
        blue, or a list of such tuples); None: pixels are ids already.

        Raises OptionsError for anything else, and for an id or colour of two classes.
        """
        if classes is None:
            return cls("as is")
        if not isinstance(classes, Mapping) or not classes:
            raise OptionsError(
                f"classes={classes!r} must map names of classes to ids or to colours, or be None"
            )
        listed = {name: _listed(name, value) for name, value in classes.items()}
        kinds = {_kind_of(name, one) for name, several in listed.items() for one in several}
        if len(kinds) > 1:
            raise OptionsError("classes= must map all names to ids, or all of them to colours")
        pairs = [(_code(one), place) for place, own in enumerate(listed.values()) for one in own]
        values = tuple(value for value, _ in pairs)
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            shown = twice if kinds == {"ids"} else _colour(twice)
            raise OptionsError(f"classes= gives {shown} to two classes; give it to one")
        return cls(kinds.pop(), tuple(listed), values, tuple(place for _, place in pairs))

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
        place = [names.index(name) for name in self.names]
        places = tuple(place[old] for old in self.places)
        return MaskClasses(self.kind, tuple(names), self.values, places)

    def class_of(self, values: _Values) -> _Values:
        """The class of each pixel, NO_CLASS for values of none; int16 unless ids are larger."""
        if self.kind == "as is":
            # int16 holds ids of 8 bits, but not all of 16.
            return values.astype(np.int16 if values.dtype.itemsize == 1 else np.int32)
        table: _Values = _table(self)[values]
        return table


@lru_cache(maxsize=4)
def _table(classes: MaskClasses) -> _Values:
    """From each possible value to its class: 32 MiB for colours, once in a process."""
    table = np.full(_NUM_IDS if classes.kind == "ids" else _NUM_COLOURS, NO_CLASS, np.int16)
    table[list(classes.values)] = classes.places
    return table


def decode_mask(data: bytes, name: str, classes: MaskClasses) -> torch.Tensor:
    """The class of each pixel: int16 tensor (height, width), int32 for masks of 16 bits as is.

    Pixels of no class are NO_CLASS. Raises SampleError as `open_image`, and if the file has colours
    where ids are expected.
    """
    import torch

    from gpupool.data.reading.decode import open_image

    with open_image(data, name, "a mask") as image:
        values = _values(image, classes)
    return torch.from_numpy(classes.class_of(values))


def _values(image: Image.Image, classes: MaskClasses) -> _Values:
    """The ids or colours of the pixels, as integers."""
    if classes.kind == "colours":
        if image.mode == "P":  # 256 colours to look up instead of millions of pixels
            palette = np.zeros((256, 3), np.int32)
            own = np.array(image.getpalette("RGB"), np.int32).reshape(-1, 3)
            # A file may hold fewer than 256 colours.
            palette[: len(own)] = own
            looked_up: _Values = _joined(palette)[np.asarray(image)]
            return looked_up
        colours: _Values = np.asarray(image.convert("RGB"), np.int32)
        return _joined(colours)
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
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < _NUM_IDS:
        raise ValueError("its ids are not in 0..65535")
    return values


def _joined(colours: _Values) -> _Values:
    """Red, green and blue in the last dimension as one number."""
    joined: _Values = colours[..., 0] << 16 | colours[..., 1] << 8 | colours[..., 2]
    return joined


def _listed(name: str, value: Any) -> Sequence[Any]:
    several = list(value) if isinstance(value, list) else [value]
    if not isinstance(name, str) or not several:
        raise OptionsError(f"classes={{{name!r}: {value!r}}} must map a name to an id or a colour")
    return several


def _kind_of(name: str, value: Any) -> str:
    if _is_int(value, _NUM_IDS):
        return "ids"
    if isinstance(value, tuple) and len(value) == 3 and all(_is_int(part, 256) for part in value):
        return "colours"
    raise OptionsError(
        f"classes={{{name!r}: {value!r}}}: give an id in 0..65535 or a colour (red, green, blue) "
        "in 0..255, or a list of several"
    )


def _is_int(value: Any, below: int) -> bool:
    # True and False are ints for Python, but nobody means them as ids.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def _code(value: Any) -> int:
    return value[0] << 16 | value[1] << 8 | value[2] if isinstance(value, tuple) else int(value)


def _colour(code: int) -> tuple[int, int, int]:
    return code >> 16, code >> 8 & 255, code & 255
