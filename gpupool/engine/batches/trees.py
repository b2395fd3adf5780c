"""Tensors in dicts, tuples and lists, as batches and outputs of networks come. Runs on engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.data.reading.collate import tensors

_MAIN = ("out", "logits")  # torchvision's segmentation and GoogLeNet; Hugging Face


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with `function` of each tensor; what is no tensor stays as it is.

    >>> map_tensors(lambda t: t, {"a": [1]})
    {'a': [1]}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        # Hugging Face's batches and outputs are mappings whose class the network may rely on.
        changed = {name: map_tensors(function, part) for name, part in tree.items()}
        return changed if type(tree) is dict else _remade(tree, changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named one takes its parts singly
        return type(tree)(*(map_tensors(function, part) for part in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, part) for part in tree)
    return tree


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor of a tree, None if it has none."""
    return next(tensors(tree), None)


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
        raise TrainingError(f"{what} have no {name!r}: {there}.", "no name", name)
    if isinstance(tree, Mapping) or isinstance(name, int):
        return tree[name]
    return getattr(tree, name)


def _remade(tree: Any, changed: dict[Any, Any]) -> Any:
    """A dict of the same class, such as an OrderedDict; a plain one if it cannot be made so."""
    try:
        return type(tree)(changed)
    except TypeError:
        return changed
