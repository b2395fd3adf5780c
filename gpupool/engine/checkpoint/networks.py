"""Networks and weights in files: `save`, `load` and `load_weights`. Runs anywhere.

The file of a network is what `torch.save` makes of plain data: `state_dict` with the weights, under
which other programs find them too, and `network` with classes and normalization. No code of a file
is run.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.network import NetworkInfo, give, info_of, without_wrappers
from gpupool.core.progress import progress
from gpupool.core.wire import state_dicts
from gpupool.core.wire.pickles import copy_of
from gpupool.data.stores.folder import FileRef
from gpupool.data.stores.writable import Target
from gpupool.engine.checkpoint.weights import copied, problem_of, read_safely

_NESTS = ("state_dict", "model_state_dict", "model", "weights")  # where others keep the weights
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DDP, torch.compile and Lightning

Url = str | os.PathLike[str]


def save(model: nn.Module, url: Url, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Write a network with its weights, classes and normalization, in the place of an older file.

    `load` reads it; and so does `torch.load(url, weights_only=True)["state_dict"]`, without
    gpupool. `url` is a path, or anything fsspec writes ("s3://bucket/birds.pt"); credentials come
    from the environment unless `storage_options`, for fsspec, have them.

    Raises TrainingError for what no file can hold; DataError if it cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise TrainingError(f"model is a {type(model).__name__}, not a network.")
    target, name = _place(url, storage_options)
    known, model = info_of(model), without_wrappers(model)
    with progress(f"Saving {name}"):
        file = io.BytesIO()
        whole = {"network": asdict(known), "state_dict": copied(model.state_dict())}
        state_dicts.save(whole, file)
        target.put(name, file.getvalue())


def load(
    url: Url, model: nn.Module, *, storage_options: Mapping[str, Any] | None = None
) -> nn.Module:
    """The network that `save` has written, in evaluation mode.

    A copy of `model`, which has any weights, gets those of the file, its classes and normalization.
    The file may also be a checkpoint of `train`, or anything that `load_weights` reads.

    Raises DataError: the file cannot be read, or is of another network.
    """
    found, shown = _read(url, storage_options)
    loaded = _filled(model, found, shown)
    give(loaded, NetworkInfo.of_plain(found.get("network") if isinstance(found, dict) else None))
    return loaded.eval()


def load_weights(
    model: nn.Module, url: Url, *, storage_options: Mapping[str, Any] | None = None
) -> nn.Module:
    """A copy of `model` with the weights in a file: what `torch.save` made of a state dict, or a
    checkpoint with one in it (also of `train`).

    No code in the file is run (`weights_only=True`). Names that DDP, `torch.compile` or Lightning
    have put before are taken off. `url` is a path, or anything fsspec reads ("https://...").

    Raises DataError: the file cannot be read, or is of another network; it says which layers.
    """
    return _filled(model, *_read(url, storage_options))


def _place(url: Url, storage_options: Mapping[str, Any] | None) -> tuple[Target, str]:
    """The query of a URL belongs to the name."""
    path, mark, query = os.fspath(url).partition("?")
    folder, slash, name = path.rpartition("/")
    target, name = Target(folder or slash or ".", dict(storage_options or {})), name + mark + query
    if path.endswith(".safetensors"):
        said = "safetensors.torch has save_file for a state_dict, and load_file, for such files."
        raise TrainingError(f"{target.name(name)}: {said}")
    return target, name


def _read(url: Url, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """What a file holds, on the CPU, and its printable URL."""
    target, name = _place(url, storage_options)
    shown = target.name(name)
    with progress(f"Loading {name.partition('?')[0]}"):
        content = target.read(FileRef(name, 0))
    return read_safely(content, shown, "weights"), shown


# ---- weights into a network --------------------------------------------------------------------


def _filled(model: nn.Module, found: Any, shown: str) -> nn.Module:
    for nest in _NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(nest), Mapping):
            found = found[nest]
    names = list(found) if isinstance(found, dict) else []
    if not all(isinstance(name, str) for name in names) or not any(
        isinstance(found[name], Tensor) for name in names
    ):
        why = f"{shown} holds a {type(found).__name__}, not the weights of a network by name"
        raise DataError(why, "no weights", url=shown)
    # A copy: the user's network is as it was if the file turns out to be another one's.
    changed = copy_of(model)
    try:
        state_dicts.load(changed, _unprefixed(found, changed))
    except RuntimeError as error:
        why = f"the weights in {shown} are of another network: {problem_of(error)}"
        raise DataError(why, "other network", url=shown) from None
    return changed


def _unprefixed(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    own = model.state_dict()
    while not set(weights) & set(own):
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights
