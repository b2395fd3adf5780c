"""Networks and weights in files: `save`, `load` and `load_weights`. Runs anywhere.

The file of a network is what `torch.save` makes of plain data: `state_dict` with the weights, under
which other programs find them too; `network` with classes and normalization; `structure`, the bytes
that `torch.save` makes of the network without its numbers. No code of a file is run: of a
structure, the classes of networks that this process has are taken, and no constructor is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.network import NetworkInfo, give, info_of, without_wrappers
from gpupool.core.progress import progress
from gpupool.core.wire import state_dicts
from gpupool.core.wire.pickles import copy_of
from gpupool.data.stores.folder import FileRef
from gpupool.data.stores.writable import Target
from gpupool.engine.checkpoint.weights import check_stored, copied, cut, problem_of, read_safely

FORMAT = 2
_NESTS = ("state_dict", "model_state_dict", "model", "weights")  # where others keep the weights
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DDP, torch.compile and Lightning
_TRUSTED = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.", "timm.", "__main__.")
_NAMES = ("relu", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "softmax", "mish")
_FUNCTIONS = {f"{f.__module__}.{f.__name__}": f for f in (getattr(functional, n) for n in _NAMES)}
_FUNCTIONS["functools.partial"] = functools.partial
_one_at_a_time = threading.Lock()  # what torch allows a file, it allows all that are being loaded

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
    target, name, shown = _place(url, storage_options)
    if _is_safetensors(name):
        raise TrainingError(f"{shown}: give another ending; safetensors.torch writes such files.")
    known, model = info_of(model), without_wrappers(model)
    with progress(f"Saving {name}"):
        whole = {"format": FORMAT, "network": asdict(known), "structure": _structure(model)}
        file = io.BytesIO()
        state_dicts.save(whole | {"state_dict": copied(model.state_dict())}, file)
        target.put(name, file.getvalue())


def load(
    url: Url, model: nn.Module | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> nn.Module:
    """The network that `save` has written, on the CPU and in evaluation mode.

    Networks of torch.nn, torchvision and timm, and of classes that the notebook defines, are made
    from the file. Any other comes as `model`, with any weights: a copy of it gets those of the
    file, which may then be a checkpoint of `train`, or anything that `load_weights` reads.

    Raises DataError: the file cannot be read, is of another network, or needs `model`.
    """
    found, shown = _read(url, storage_options)
    loaded = _made(found, shown) if model is None else _filled(model, found, shown)
    give(loaded, NetworkInfo.of_plain(found.get("network") if isinstance(found, dict) else None))
    return loaded.eval()


def load_weights(
    model: nn.Module, url: Url, *, storage_options: Mapping[str, Any] | None = None
) -> nn.Module:
    """A copy of `model` with the weights in a file: what `torch.save` made of a state dict, a
    checkpoint with one in it (also of `train`), or a file of safetensors.

    No code in the file is run (`weights_only=True`). Names that DDP, `torch.compile` or Lightning
    have put before are taken off. `url` is a path, or anything fsspec reads ("https://...").

    Raises DataError: the file cannot be read, or is of another network; it says which layers.
    """
    return _filled(model, *_read(url, storage_options))


def _place(url: Url, storage_options: Mapping[str, Any] | None) -> tuple[Target, str, str]:
    """Folder and name of a file, and its printable URL; the query of a URL belongs to the name."""
    path, mark, query = os.fspath(url).partition("?")
    folder, slash, name = path.rpartition("/")
    target, name = Target(folder or slash or ".", dict(storage_options or {})), name + mark + query
    return target, name, target.name(name)


def _is_safetensors(name: str) -> bool:
    return name.partition("?")[0].endswith(".safetensors")


def _read(url: Url, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """What a file holds, on the CPU, and its printable URL."""
    target, name, shown = _place(url, storage_options)
    with progress(f"Loading {name.partition('?')[0]}"):
        content = target.read(FileRef(name, 0))
    if not _is_safetensors(name):
        return read_safely(content, shown, "weights"), shown
    try:
        from safetensors.torch import load as from_bytes
    except ImportError:
        what = f"{shown} is a file of safetensors: pip install safetensors, to read it"
        raise DataError(what, "no safetensors", url=shown) from None
    try:
        return from_bytes(content), shown
    except Exception as error:  # of its header
        why = f"{shown} gives no weights: {cut(str(error))}"
        raise DataError(why, "no weights", url=shown) from None


# ---- weights into a network --------------------------------------------------------------------


def _filled(model: nn.Module, found: Any, shown: str) -> nn.Module:
    """A copy of `model` with the weights in what a file holds."""
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


# ---- a network without its numbers -------------------------------------------------------------


def _structure(model: nn.Module) -> bytes | None:
    """A network with one number for each tensor; None of one that torch cannot save."""
    try:
        bare = copy_of(model).cpu()
        give(bare, NetworkInfo())
        for tensor in bare.state_dict(keep_vars=True).values():
            if isinstance(tensor, Tensor):
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
        file = io.BytesIO()
        torch.save(bare, file)
        return file.getvalue()
    except Exception:  # pickling runs arbitrary code of the objects' classes
        return None


def _made(found: Any, shown: str) -> nn.Module:
    """The network in what a file holds."""
    try:
        model, state = _bare(found["structure"]), found["state_dict"]
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and tensor.shape == state[name].shape:
                tensor.data = state[name]
        state_dicts.load(model, state)
        return model
    except Exception as error:  # a structure may be anything
        raise DataError(
            f"{shown} gives no network ({cut(f'{type(error).__name__}: {error}')}): only networks "
            "of torch.nn, torchvision, timm and this notebook are made from the file of "
            "gpupool.save. Make the network, and gpupool.load(url, model) fills it.",
            "no network",
            url=shown,
        ) from None


class _Uncallable(type):
    """The class of classes without a constructor."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        raise TypeError(f"a call of {cls.__name__}")


def _bare(structure: bytes) -> nn.Module:
    """The network of a structure.

    torch calls what is allowed, with what the file likes. So it reads the file once with classes
    that nobody can call: a network needs none of its constructors to be called.
    """
    check_stored(structure)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(structure))
    found = {name: _allowed(name) for name in names}
    for guards in (True, False):
        kinds: list[Any] = [
            (_Uncallable(one.__name__, (), {}) if guards and name not in _FUNCTIONS else one, name)
            for name, one in found.items()
        ]
        with _one_at_a_time, torch.serialization.safe_globals(kinds):
            model = torch.load(io.BytesIO(structure), map_location="cpu", weights_only=True)
    if not isinstance(model, nn.Module):
        raise TypeError(f"a {type(model).__name__}")
    return model


def _allowed(name: str) -> Any:
    """A class of networks, or a function, by name; raises TypeError for anything else."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    place, _, last = name.rpartition(".")
    found = None
    if name.startswith(_TRUSTED):
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(place), last, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise TypeError(name)
    return found
