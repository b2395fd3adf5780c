"""What a network knows beside its weights: classes, normalization, size of inputs. Runs anywhere.

    result.model.gpupool.classes        # ("cat", "dog")

It is an attribute of the module, so it comes along with copies, `torch.save` and DDP, and is not in
the state dict, whose names other programs know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

ATTRIBUTE = "gpupool"
# Where DDP and torch.compile keep the network, by their classes: other modules may call a part so.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
_MAX_CLASSES = 1_000_000

Scaling = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class NetworkInfo:
    """What a training leaves with its network; empty where nothing is known.

    `classes`: the name of each output. `normalization`: mean and standard deviation of the channels
    of its inputs, images in 0..1. `input_shape`: (channels, height, width) of the images that it
    was trained on, where a sample has one target. `from_raw`: the training data had no
    normalization of their own, and were given this one.
    """

    classes: tuple[str, ...] = ()
    normalization: Scaling | None = None
    input_shape: tuple[int, ...] = ()
    from_raw: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A module that was saved can be read where there is no gpupool.
        return SimpleNamespace, (), asdict(self)

    def __copy__(self) -> NetworkInfo:
        return self

    def __deepcopy__(self, memo: object) -> NetworkInfo:
        return self

    def __bool__(self) -> bool:
        return self != _NOTHING

    def plain(self) -> dict[str, Any]:
        """What a file holds: lists, texts and numbers."""
        mean_and_std = self.normalization
        return {
            "classes": list(self.classes),
            "normalization": None if mean_and_std is None else [list(n) for n in mean_and_std],
            "input_shape": list(self.input_shape),
            "from_raw": self.from_raw,
        }

    @classmethod
    def of_plain(cls, found: object) -> NetworkInfo:
        """What `plain` gave; whatever else a file holds there is left out."""
        if not isinstance(found, Mapping):
            return cls()
        classes, scaling = _list(found.get("classes")), _list(found.get("normalization"))
        shape = _list(found.get("input_shape"))
        parts = tuple(tuple(map(float, _list(part))) for part in scaling if _are_numbers(part))
        fits = len(parts) == 2 and len(parts[0]) == len(parts[1]) > 0 and all(parts[1])
        are_names = len(classes) <= _MAX_CLASSES and all(type(name) is str for name in classes)
        are_sizes = len(shape) < 10 and all(type(n) is int and n > 0 for n in shape)
        return cls(
            tuple(classes) if are_names else (),
            (parts[0], parts[1]) if fits else None,
            tuple(shape) if are_sizes else (),
            found.get("from_raw") is True,
        )


_NOTHING = NetworkInfo()


def info_of(model: object) -> NetworkInfo:
    """What a network knows, also within DDP or `torch.compile`."""
    found = getattr(without_wrappers(model), ATTRIBUTE, None)
    if isinstance(found, NetworkInfo):
        return found
    # Another object of this name, or one that was unpickled.
    return NetworkInfo.of_plain(getattr(found, "__dict__", None))


def without_wrappers(model: Any) -> Any:
    """The network itself, whose weights have their own names."""
    while type(model).__name__ in WRAPPERS:
        model = getattr(model, WRAPPERS[type(model).__name__])
    return model


def give(model: Any, info: NetworkInfo) -> None:
    """Let a network know this; nothing takes away what it knew."""
    if info:
        setattr(model, ATTRIBUTE, info)
    elif hasattr(model, ATTRIBUTE):
        delattr(model, ATTRIBUTE)


def in_words(scaling: Scaling) -> str:
    """
    >>> in_words(((0.5,), (0.25,)))
    'mean 0.5, std 0.25'
    """
    mean, std = (", ".join(f"{value:.4g}" for value in part) for part in scaling)
    return f"mean {mean}, std {std}" if "," not in mean else f"mean ({mean}), std ({std})"


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _are_numbers(part: object) -> bool:
    values = _list(part)
    return all(type(v) in (int, float) and math.isfinite(v) for v in values)
