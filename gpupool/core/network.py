"""What a network knows beside its weights: classes, normalization, size of inputs. Runs anywhere.

    result.model.gpupool.classes        # ("cat", "dog")

It is an attribute of the module, so it comes along with copies, `torch.save` and DDP, and is not in
the state dict, whose names other programs know.
"""

from __future__ import annotations

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

    def __bool__(self) -> bool:
        return any(vars(self).values())

    @classmethod
    def of_plain(cls, found: Any) -> NetworkInfo:
        """What `dataclasses.asdict` gave; nothing where a file holds anything else there."""
        try:
            mean, std = found["normalization"] or ((), ())
            scaling = tuple(map(float, mean)), tuple(map(float, std))
            return cls(
                tuple(map(str, found["classes"])),
                scaling if std and all(std) else None,
                tuple(map(int, found["input_shape"])),
                bool(found["from_raw"]),
            )
        except (TypeError, ValueError, KeyError):
            return cls()


def info_of(model: object) -> NetworkInfo:
    """What a network knows, also within DDP or `torch.compile`."""
    found = getattr(without_wrappers(model), ATTRIBUTE, None)
    # It may be another object of this name, or one that was unpickled.
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
