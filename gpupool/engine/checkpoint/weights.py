"""Weights of a network from a file at any URL. Runs anywhere; imports torch when used."""

from __future__ import annotations

import copy
import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import DataError
from gpupool.core.progress import progress
from gpupool.core.terminal import plain
from gpupool.core.wire.pickles import copy_of
from gpupool.core.wire.state_dicts import load
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef

if TYPE_CHECKING:
    from torch import Tensor, nn

_NESTS = ("state_dict", "model_state_dict", "model", "weights")  # where others keep the weights
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DDP, torch.compile and Lightning
_MAX_NAMED = 3
_MAX_REASON = 300  # characters
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
    _require_same(model.state_dict(), weights, shown)
    # A copy: the user's network is as it was if the file turns out to be another one's.
    changed = copy_of(model)
    try:
        load(changed, weights)
    except RuntimeError as error:  # sparse ones for dense ones, say
        reason = " ".join(str(error).split())
        raise DataError(
            f"the weights in {shown} cannot be loaded: {reason}", "other weights", url=shown
        ) from None
    return changed


def copied(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict that later steps do not change: its tensors are on the CPU."""
    from torch import Tensor

    copies = {
        name: one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else copy.deepcopy(one)
        for name, one in state.items()
    }
    return same_kind(state, copies)


def same_kind(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """These values with what torch notes about the state: the versions of its modules."""
    made: OrderedDict[str, Any] = OrderedDict(values)
    made._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return made


def read_without_code(content: bytes | memoryview, shown: str, what: str) -> Any:
    """What `torch.save` made, on the CPU.

    Raises DataError, saying that `shown` holds no `what`, if it is anything else, or compressed: a
    small file could fill the memory, and `torch.save` compresses nothing.
    """
    import torch

    refused: list[str] = []
    try:
        if content[:4] == _ZIP:
            _require_stored(content)
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the readers of archives and pickles raise what they like
        reason = _plain(error)
        if refused:
            reason = (
                f"it also holds {plain(', '.join(sorted(refused)))[:_MAX_REASON]}. Where you trust "
                "it, load it with torch, and save the weights alone: "
                'torch.save(checkpoint["model"], ...)'
            )
        raise DataError(
            f"{shown} holds no {what} that can be read without running code in it: {reason}",
            "not safe",
            url=shown,
        ) from None


def _plain(error: Exception) -> str:
    """What an error says of a file, which may have chosen the words."""
    # torch's own advice comes first, and would run the file's code.
    said = str(error).rpartition("WeightsUnpickler error: ")[2]
    return plain(said.split("\n")[0] or type(error).__name__)[:_MAX_REASON]


def _require_stored(content: bytes | memoryview) -> None:
    """Raise ValueError if an archive unpacks to more than it has."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    # Were something before the first one, torch might find other entries than these.
    first = min((entry.header_offset for entry in entries), default=0)
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if first or not is_stored or sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("it is compressed, which torch.save never does; save it again with that")


def _state_dict(content: bytes, shown: str) -> dict[str, Any]:
    """The tensors by name."""
    import torch

    if is_safetensors(shown):
        return _safetensors(content, shown)
    found = read_without_code(content, shown, "weights")
    for nest in _NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(nest), Mapping):
            found = found[nest]
    if not isinstance(found, Mapping) or not any(
        isinstance(v, torch.Tensor) for v in found.values()
    ):
        raise DataError(
            f"{shown} holds a {type(found).__name__}, not the weights of a network by name",
            "no weights",
            url=shown,
        )
    return same_kind(found, {str(name): value for name, value in found.items()})


def _safetensors(content: bytes, shown: str) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load
    except ImportError:
        raise DataError(
            f"to read {shown}, install safetensors: pip install safetensors", "no safetensors"
        ) from None
    try:
        return dict(load(content))
    except Exception as error:  # of its header
        reason = _plain(error)
        raise DataError(
            f"{shown} holds no weights of safetensors: {reason}", "no weights", url=shown
        ) from None


def _unprefixed(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    own = model.state_dict()
    while not set(weights) & set(own):
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in weights)), None)
        if prefix is None:
            break
        weights = _without(prefix, weights)
    return weights


def _without(prefix: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """These weights under shorter names, with the versions of their modules."""
    made = OrderedDict({name.removeprefix(prefix): value for name, value in weights.items()})
    noted = getattr(weights, "_metadata", None) or {}
    versions = {f"{name}.".removeprefix(prefix)[:-1]: about for name, about in noted.items()}
    made._metadata = versions  # type: ignore[attr-defined]
    return made


def _shape(value: Any) -> Any:
    """Of a tensor; None of what is none."""
    return getattr(value, "shape", None)


def _require_same(own: Mapping[str, Any], weights: Mapping[str, Any], shown: str) -> None:
    """Raise DataError if names or shapes differ."""
    missing = [name for name in own if name not in weights]
    beyond = [name for name in weights if name not in own]
    others = [n for n in own if n in weights and _shape(own[n]) != _shape(weights[n])]
    faults = [
        f"{len(names)} {what} ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > 3 else ''})"
        for names, what in (
            (missing, "are missing"),
            (beyond, "are not in the network"),
            (others, "have another shape"),
        )
        if names
    ]
    if not faults:
        return
    hint = ""
    last = (weights[others[-1]], own[others[-1]]) if others and not missing and not beyond else ()
    if last and all(map(_shape, last)):  # neither is a single number, or no tensor at all
        old, new = (value.shape[0] for value in last)
        hint = (
            f"; it has {old} classes, the network {new}: make it with {old}, load the weights, and "
            f"then replace_head(model, {new})"
        )
    raise DataError(
        f"the weights in {shown} are of another network: {'; '.join(faults)}{hint}",
        "other network",
        url=shown,
    )
