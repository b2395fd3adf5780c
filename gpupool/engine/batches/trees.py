"""What outputs of a network have in them, by name or number. Runs on engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpupool.core.errors import TrainingError

_MAIN = ("out", "logits")  # torchvision's segmentation and GoogLeNet; Hugging Face


def main_output(outputs: Any) -> Any:
    """What a network is about, of outputs with more in them; one that is a tensor as it is.

    That is "out" or "logits" of a dict or named tuple, as torchvision's segmentation networks,
    GoogLeNet, Inception and the networks of Hugging Face give them.
    """
    if not isinstance(outputs, Tensor):
        for name in _MAIN:
            if has_part(outputs, name):
                return part_of(outputs, name)
    return outputs


def has_part(tree: Any, name: Any) -> bool:
    """Whether a dict, tuple or named tuple has something under this name or number."""
    if isinstance(tree, Mapping):
        return name in tree
    if isinstance(name, int):
        return isinstance(tree, (list, tuple)) and -len(tree) <= name < len(tree)
    return isinstance(tree, tuple) and name in getattr(tree, "_fields", ())


def part_of(tree: Any, name: Any, what: str = "the outputs of the network") -> Any:
    """What a dict, tuple or named tuple has under a name or number.

    Raises TrainingError, with the names there are, if it has none.
    """
    if not has_part(tree, name):
        names = tree if isinstance(tree, Mapping) else getattr(tree, "_fields", None)
        if names is None and isinstance(tree, (list, tuple)):
            names = range(len(tree))
        there = f"only {', '.join(map(repr, names))}" if names else f"are a {type(tree).__name__}"
        raise TrainingError(f"{what} have no {name!r}: {there}.")
    if isinstance(tree, Mapping) or isinstance(name, int):
        return tree[name]
    return getattr(tree, name)
