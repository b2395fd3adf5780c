"""Tensors in dicts, tuples and lists, as samples, batches and outputs of networks come. Runs
anywhere; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of a tree of dicts, lists and tuples, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors(part)


def first_tensor(tree: Any) -> Tensor | None:
    return next(tensors(tree), None)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with `function` of each tensor; what is no tensor stays as it is.

    >>> map_tensors(lambda t: t, {"a": [1]})
    {'a': [1]}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (Mapping, list, tuple)):
        return _mapped(lambda part: map_tensors(function, part), tree)
    return tree


def pinned(tree: Any) -> Any:
    """The same tree in page-locked memory, which a GPU copies while it computes."""
    return map_tensors(Tensor.pin_memory, tree)


def rows(tree: Any, start: int, stop: int, num: int) -> Any:
    """Samples `start` to `stop` of a batch of `num`, whose tensors have the samples first.

    A list of one entry a sample, as detection has them, is cut itself.

    Raises ValueError, with what it has met, for a part that cannot be cut.
    """
    if isinstance(tree, Tensor):
        if not tree.ndim or len(tree) != num:
            raise ValueError(f"a tensor of shape {tuple(tree.shape)}")
        return tree[start:stop]
    if isinstance(tree, (list, tuple)):
        parts = list(tensors(tree))
        if not parts or any(not part.ndim or len(part) != num for part in parts):
            if len(tree) != num:
                raise ValueError(f"a {type(tree).__name__} of {len(tree)}")
            return tree[start:stop]
    if isinstance(tree, (Mapping, list, tuple)):
        return _mapped(lambda part: rows(part, start, stop, num), tree)
    if isinstance(tree, (int, float, str, bool, type(None), Exception)):
        return tree
    raise ValueError(f"a {type(tree).__name__}")


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A dict, list or tuple of the same class, with `function` of each part."""
    if isinstance(tree, Mapping):
        # Hugging Face's batches and outputs are mappings whose class the network may rely on.
        changed = {name: function(part) for name, part in tree.items()}
        return changed if type(tree) is dict else remade(tree, changed)
    if hasattr(tree, "_fields"):  # a named one takes its parts singly
        return type(tree)(*map(function, tree))
    return type(tree)(map(function, tree))


def remade(tree: Any, changed: dict[Any, Any]) -> Any:
    """A dict of the same class, such as an OrderedDict; a plain one if it cannot be made so."""
    try:
        return type(tree)(changed)
    except TypeError:
        return changed
