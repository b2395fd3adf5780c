"""States on their way into files, and back without running code. Runs anywhere."""

from __future__ import annotations

import copy
import io
import zipfile
from typing import Any

import torch

from gpupool.core.errors import DataError
from gpupool.core.terminal import plain
from gpupool.data import device as devices
from gpupool.data.device import Mark
from gpupool.data.reading.trees import tensors

_MAX_CHARS = 300
_MARKS_FOLDER = 0x10  # as MS-DOS did
_ZIP = b"PK\x03\x04"  # by which torch knows an archive from its older formats


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


def read_safely(content: bytes, shown: str, what: str) -> Any:
    """What `torch.save` made, on the CPU. Raises DataError, saying that `shown` holds no `what`, if
    it is anything else."""
    try:
        if content[:4] == _ZIP:
            check_stored(content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the readers of archives and pickles raise what they like
        if "PytorchStreamReader" in str(error):
            raise DataError(f"{shown} is damaged; take another one", "damaged", url=shown) from None
        # torch's own advice comes first, and would run the file's code.
        reason = cut(str(error).rpartition("WeightsUnpickler error: ")[2] or type(error).__name__)
        raise DataError(
            f"{shown} holds no {what} that can be read without running code in it ({reason}). "
            "Where you trust it, load it with torch, and save the weights alone.",
            "not safe",
            url=shown,
        ) from None


def check_stored(content: bytes) -> None:
    """Raise ValueError for an archive as torch.save makes none.

    A small one that is compressed could fill the memory; and for a part that is marked as a folder
    torch gives what lies in memory just then.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    # Were something before the first one, torch might find other entries than these.
    first = min((entry.header_offset for entry in entries), default=0)
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if first or not is_stored or sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("it is compressed, which torch.save never does; save it again with that")
    if any(entry.external_attr & _MARKS_FOLDER for entry in entries):
        raise ValueError("a part of it is marked as a folder, which torch.save never does")


def problem_of(error: Exception) -> str:
    """What torch says, without a headline over the lines that say more."""
    headline, *listed = str(error).split("\n")
    return cut("; ".join(line.strip() for line in listed) or headline or type(error).__name__)


def cut(said: str) -> str:
    """The first line of what a file, or torch, may have chosen the words of."""
    return plain(said.split("\n")[0])[:_MAX_CHARS]
