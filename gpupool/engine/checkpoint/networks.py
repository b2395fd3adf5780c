"""Networks in files, with all that is known of them: `save` and `load`. Runs anywhere.

    gpupool.save(result.model, "s3://bucket/birds.pt")
    network = gpupool.load("s3://bucket/birds.pt")
    gpupool.predict(network, "s3://bucket/new/", names=True)

The file is what `torch.save` makes of plain data: `state_dict` with the weights, under which other
programs find them too; `network` with classes and normalization; `structure`, see `structure.py`.
No code of a file is run. A file of safetensors has the weights, and what is known as metadata.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.network import ATTRIBUTE, NetworkInfo, give, info_of, without_wrappers
from gpupool.core.progress import progress
from gpupool.core.wire.state_dicts import load as load_state
from gpupool.core.wire.state_dicts import save as save_state
from gpupool.data.stores.writable import Target
from gpupool.engine.checkpoint.structure import NotPlainError, built, described
from gpupool.engine.checkpoint.weights import (
    copied,
    filled,
    is_safetensors,
    place_of,
    read,
    read_without_code,
)

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
_KEY = "gpupool"  # of the metadata of safetensors


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
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TrainingError(f"model is a {type(model).__name__}, not a network.")
    known = info_of(model)
    model = without_wrappers(model)
    state = copied(model.state_dict())
    target, name = place_of(url)
    with progress(f"Saving {name}"):
        if is_safetensors(name):
            content = _as_safetensors(state, known)
        else:
            content = _as_file(model, state, known)
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
    content, shown = read(url, storage_options)
    found: Any = {}
    if is_safetensors(shown):
        known = _metadata(content)
    else:
        found = read_without_code(content, shown, "network")
        found = found if isinstance(found, Mapping) else {}
        known = NetworkInfo.of_plain(found.get("network"))
    loaded = _made(found, shown) if model is None else filled(model, content, shown)
    give(loaded, known)
    return loaded.eval()


def _as_file(model: nn.Module, state: Mapping[str, Any], known: NetworkInfo) -> bytes:
    try:
        structure = described(model, ATTRIBUTE)
    except NotPlainError:  # `load` will need a network to fill
        structure = None
    whole = {
        "format": FORMAT,
        "state_dict": state,
        "network": known.plain(),
        "structure": structure,
    }
    file = io.BytesIO()
    save_state(whole, file)
    return file.getvalue()


def _made(found: Mapping[str, Any], shown: str) -> nn.Module:
    if found.get("structure") is None:
        raise DataError(
            f"{shown} holds weights without the network that they are of; make it, and "
            "gpupool.load(url, model) fills it.",
            "no network",
            url=shown,
        )
    try:
        state = found["state_dict"]
        model = built(found["structure"], state)
        load_state(model, state)
        return model
    except NotPlainError as error:
        raise DataError(
            f"{shown} is of the class {error}: only those of torch.nn, torchvision, timm and this "
            "notebook are made from a file. Make the network, and gpupool.load(url, model) fills "
            "it.",
            "unknown class",
            url=shown,
        ) from None
    except Exception as error:  # a structure may be anything
        raise DataError(
            f"{shown} holds no network that can be made ({type(error).__name__}); it is damaged.",
            "damaged",
            url=shown,
        ) from None


def _as_safetensors(state: Mapping[str, Any], known: NetworkInfo) -> bytes:
    try:
        from safetensors.torch import save as to_bytes
    except ImportError:
        raise DataError(
            "to write safetensors, install it: pip install safetensors", "no safetensors"
        ) from None
    if others := [name for name, value in state.items() if not hasattr(value, "contiguous")]:
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
