"""Networks in files, with all that is known of them: `save` and `load`. Runs anywhere.

    gpupool.save(result.model, "s3://bucket/birds.pt")
    network = gpupool.load("s3://bucket/birds.pt")
    gpupool.predict(network, "s3://bucket/new/", names=True)

The file is what `torch.save` makes of plain data: `state_dict` with the weights, under which other
programs find them too; `network` with classes and normalization; `structure`, the bytes that
`torch.save` makes of the network without its numbers. No code of a file is run: of a structure, the
classes of networks that this process has are taken, and none of their constructors is called. A
file of safetensors has the weights, and what is known as metadata.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.network import NetworkInfo, give, info_of, without_wrappers
from gpupool.core.progress import progress
from gpupool.core.wire.pickles import copy_of
from gpupool.core.wire.state_dicts import load as load_state
from gpupool.core.wire.state_dicts import save as save_state
from gpupool.data.stores.writable import Target
from gpupool.engine.checkpoint import weights

FORMAT = 2
_KEY = "gpupool"  # of the metadata of safetensors
_TRUSTED = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.", "timm.", "__main__.")
_NAMES = ("relu", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "softmax", "mish")
_FUNCTIONS = {f"{f.__module__}.{f.__name__}": f for f in (getattr(functional, n) for n in _NAMES)}
_FUNCTIONS["functools.partial"] = functools.partial
_one_at_a_time = threading.Lock()  # what torch allows a file, it allows all that are being loaded


def save(
    model: nn.Module,
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a network with its weights, classes and normalization, in the place of an older file.

    `load` reads it; and so does `torch.load(url, weights_only=True)["state_dict"]`, without
    gpupool. A URL that ends in ".safetensors" makes such a file.

    Args:
        url: a path, or anything fsspec writes ("s3://bucket/birds.pt").
        storage_options: for fsspec; credentials come from the environment unless given.

    Raises:
        TrainingError: the input is no network, or keeps beside its tensors what no file can hold.
        DataError: the file cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise TrainingError(f"model is a {type(model).__name__}, not a network.")
    known = info_of(model)
    model = without_wrappers(model)
    state = weights.copied(model.state_dict())
    target, name = weights.place_of(url)
    with progress(f"Saving {name}"):
        if weights.is_safetensors(name):
            content = _as_safetensors(state, known)
        else:
            file = io.BytesIO()
            network, structure = known.plain(), _structure(model)
            whole = {"format": FORMAT, "network": network, "structure": structure}
            save_state(whole | {"state_dict": state}, file)
            content = file.getvalue()
        Target(target, storage_options or {}).put(name, content)


def load(
    url: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The network that `save` has written, on the CPU and in evaluation mode.

    Networks of torch.nn, torchvision and timm, and of classes that the notebook defines, are made
    from the file. Any other comes as `model`, with any weights: a copy of it gets those of the
    file, which may then be a checkpoint of `train`, or anything that `load_weights` reads.

    Raises:
        DataError: the file cannot be read, is of another network, or needs `model`.
    """
    content, shown = weights.read(url, storage_options)
    found: Any = {}
    if weights.is_safetensors(shown):
        known = _metadata(content)
    else:
        found = weights.read_without_code(content, shown, "network")
        found = found if isinstance(found, Mapping) else {}
        known = NetworkInfo.of_plain(found.get("network"))
    loaded = _made(found, shown) if model is None else weights.filled(model, content, shown)
    give(loaded, known)
    return loaded.eval()


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


def _made(found: Mapping[str, Any], shown: str) -> nn.Module:
    if not isinstance(found.get("structure"), bytes):
        raise DataError(
            f"{shown} holds weights without the network that they are of; make it, and "
            "gpupool.load(url, model) fills it.",
            "no network",
            url=shown,
        )
    try:
        model, state = _bare(found["structure"]), found["state_dict"]
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and tensor.shape == state[name].shape:
                tensor.data = state[name]
        load_state(model, state)
        return model
    except _UntrustedError as error:
        raise DataError(
            f"{shown} needs {error}: only classes of torch.nn, torchvision, timm and this notebook "
            "are made from a file. Make the network, and gpupool.load(url, model) fills it.",
            "unknown class",
            url=shown,
        ) from None
    except Exception as error:  # a structure may be anything
        raise DataError(
            f"{shown} holds no network that can be made ({type(error).__name__}); it is damaged.",
            "damaged",
            url=shown,
        ) from None


def _bare(structure: bytes) -> nn.Module:
    """The network of a structure.

    torch calls what is allowed, with what the file likes. So it reads the file once with classes
    that nobody can call: a network needs none of its constructors to be called.
    """
    found = {name: _allowed(name) for name in weights.globals_in(structure)}
    for guards in (True, False):
        kinds: list[Any] = [
            (_Uncallable(one.__name__, (), {}) if guards and name not in _FUNCTIONS else one, name)
            for name, one in found.items()
        ]
        with _one_at_a_time, torch.serialization.safe_globals(kinds):
            model = torch.load(io.BytesIO(structure), map_location="cpu", weights_only=True)
    if not isinstance(model, nn.Module):
        raise TypeError(type(model).__name__)
    for module in model.modules():
        for name, value in vars(module).items():
            is_hook = name.endswith("hooks") and value and not isinstance(value, bool)
            # Nor may a file put anything in the place of a method, or of what is called as one.
            if is_hook or callable(getattr(type(module), name, None)) or "_call_impl" in name:
                raise _UntrustedError(f"{name} of {type(module).__name__}")
    return model


class _UntrustedError(Exception):
    """A structure has what no file may make."""


class _Uncallable(type):
    """The class of classes without a constructor."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        raise _UntrustedError(f"a call of {cls.__name__}")


def _allowed(name: str) -> Any:
    """A class of networks, or a function, by name; raises _UntrustedError for anything else."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    place, _, last = name.rpartition(".")
    found = None
    if name.startswith(_TRUSTED):
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(place), last, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise _UntrustedError(name)
    return found


def _as_safetensors(state: Mapping[str, Any], known: NetworkInfo) -> bytes:
    try:
        from safetensors.torch import save as to_bytes
    except ImportError:
        raise DataError(
            "to write safetensors, install it: pip install safetensors", "no safetensors"
        ) from None
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise TrainingError(
            f"a file of safetensors holds tensors alone, and {others[0]} is none; save the network "
            "with another ending than .safetensors."
        )
    # Each tensor with memory of its own, as the format demands.
    tensors = {name: value.clone().contiguous() for name, value in state.items()}
    return bytes(to_bytes(tensors, {"format": "pt", _KEY: json.dumps(known.plain())}))


def _metadata(content: bytes) -> NetworkInfo:
    """What is known, of the header of a file of safetensors: eight bytes of length, then JSON."""
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        return NetworkInfo.of_plain(json.loads(header["__metadata__"][_KEY]))
    except (ValueError, KeyError, TypeError, RecursionError):  # of another program
        return NetworkInfo()
