"""Weights of a network from a file at any URL. Runs anywhere."""

from __future__ import annotations

import copy
import io
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gpupool.core.errors import DataError
from gpupool.core.progress import progress
from gpupool.core.terminal import plain
from gpupool.core.wire.pickles import copy_of
from gpupool.core.wire.state_dicts import load
from gpupool.data import device as devices
from gpupool.data.device import Mark
from gpupool.data.reading.trees import tensors
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef

_NESTS = ("state_dict", "model_state_dict", "model", "weights")  # where others keep the weights
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DDP, torch.compile and Lightning
_MAX_CHARS = 300  # of words that a file, or torch, has chosen
_ZIP = b"PK\x03\x04"  # by which torch knows an archive from its older formats


def load_weights(
    model: nn.Module,
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A copy of `model` with the weights in a file: what `torch.save` made of a state dict, a
    checkpoint with one in it (also of `train`), or a file of safetensors.

    No code in the file is run (`weights_only=True`). Names that DDP, `torch.compile` or Lightning
    have put before are taken off.

    Args:
        url: a path, or anything fsspec reads ("s3://bucket/resnet18.pth", "https://...").
        storage_options: for fsspec; credentials come from the environment unless given.

    Raises:
        DataError: the file cannot be read, or its weights are not those of this network; says which
            layers are others.
    """
    return filled(model, *read(url, storage_options))


def place_of(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Folder and name of a file; the query of a URL belongs to the name."""
    path, mark, query = os.fspath(url).partition("?")
    folder, slash, name = path.rpartition("/")
    return folder or slash or ".", f"{name}{mark}{query}"


def is_safetensors(name: str) -> bool:
    """Whether a file is of that format, by its name or URL."""
    return name.partition("?")[0].endswith(".safetensors")


def read(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[bytes, str]:
    """The content of a file, and its URL as it may be printed."""
    folder, name = place_of(url)
    source = Folder(folder, dict(storage_options or {}))
    shown = source.name(name)
    with progress(f"Loading {place_of(shown)[1]}"):
        return source.read(FileRef(name, 0)), shown


def filled(model: nn.Module, content: bytes, shown: str) -> nn.Module:
    """As `load_weights`, of the content of a file whose printable URL is `shown`."""
    weights = _unprefixed(_state_dict(content, shown), model)
    # A copy: the user's network is as it was if the file turns out to be another one's.
    changed = copy_of(model)
    try:
        load(changed, weights)
    except RuntimeError as error:
        headline, *listed = str(error).split("\n")  # torch's headline says less than the lines
        found = _cut("; ".join(line.strip() for line in listed) or headline)
        raise DataError(
            f"the weights in {shown} are of another network: {found}", "other network", url=shown
        ) from None
    return changed


def copying(state: dict[str, Any]) -> tuple[dict[str, Any], list[Mark]]:
    """A copy of a state on the CPU, which is whole when these marks are reached.

    Tensors of a GPU are copied in the order of its stream: later kernels wait for that, and the
    caller does not.
    """
    sources = list(tensors(state))
    copies = [devices.of(one.device).host_buffer(one) for one in sources]
    if sources:
        # One call for all: hundreds of small copies would each cost a launch.
        with torch.no_grad():
            torch._foreach_copy_(copies, sources, non_blocking=True)
    marks = [devices.of(device).mark() for device in {one.device for one in sources}]
    # With what torch notes beside the tensors of a network: the versions of its modules.
    known = {id(one): made for one, made in zip(sources, copies, strict=True)}
    return copy.deepcopy(state, known), marks


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state that later steps do not change; its tensors are on the CPU."""
    copies, marks = copying(state)
    for mark in marks:
        mark.synchronize()
    return copies


def read_without_code(content: bytes, shown: str, what: str) -> Any:
    """What `torch.save` made, on the CPU.

    Raises DataError, saying that `shown` holds no `what`, if it is anything else.
    """
    refused: list[str] = []
    try:
        refused = globals_in(content) if content[:4] == _ZIP else []
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the readers of archives and pickles raise what they like
        # torch's own advice comes first, and would run the file's code.
        reason = _cut(str(error).rpartition("WeightsUnpickler error: ")[2] or type(error).__name__)
        if refused:
            reason = (
                f"it also holds {_cut(', '.join(refused))}. Where you trust it, load it with torch "
                'and save the weights alone: torch.save(checkpoint["model"], ...)'
            )
        raise DataError(
            f"{shown} holds no {what} that can be read without running code in it: {reason}",
            "not safe",
            url=shown,
        ) from None


def globals_in(content: bytes) -> list[str]:
    """What an archive of `torch.save` names beyond tensors and plain values: classes, functions.

    Raises ValueError if it is compressed: a small file could fill the memory, and `torch.save`
    compresses nothing.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    # Were something before the first one, torch might find other entries than these.
    first = min((entry.header_offset for entry in entries), default=0)
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if first or not is_stored or sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("it is compressed, which torch.save never does; save it again with that")
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)))


def _cut(said: str) -> str:
    """The first line of what a file may have chosen the words of."""
    return plain(said.split("\n")[0])[:_MAX_CHARS]


def _state_dict(content: bytes, shown: str) -> dict[str, Any]:
    """The tensors by name."""
    if is_safetensors(shown):
        return _safetensors(content, shown)
    found = read_without_code(content, shown, "weights")
    for nest in _NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(nest), Mapping):
            found = found[nest]
    if (
        not isinstance(found, dict)
        or not all(isinstance(name, str) for name in found)
        or not any(isinstance(value, torch.Tensor) for value in found.values())
    ):
        raise DataError(
            f"{shown} holds a {type(found).__name__}, not the weights of a network by name",
            "no weights",
            url=shown,
        )
    return found


def _safetensors(content: bytes, shown: str) -> dict[str, Any]:
    try:
        from safetensors.torch import load
    except ImportError:
        raise DataError(
            f"to read {shown}, install safetensors: pip install safetensors", "no safetensors"
        ) from None
    try:
        return dict(load(content))
    except Exception as error:  # of its header
        raise DataError(
            f"{shown} holds no weights of safetensors: {_cut(str(error))}", "no weights", url=shown
        ) from None


def _unprefixed(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    own = model.state_dict()
    while not set(weights) & set(own):
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights
