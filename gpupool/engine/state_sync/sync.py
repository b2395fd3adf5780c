"""Named state of one rank for the others, by broadcast. Runs on engines, on all at once.

Two phases: first every rank has received and unpickled all of it, then all change what their names
mean, or none does. What is shared among the values (an optimizer's parameters are the model's)
stays shared, because they are one pickle.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gpupool.core.wire.calls import SyncState
from gpupool.core.wire.pickles import why_not
from gpupool.engine.cells.execute import cell_names
from gpupool.engine.cells.variables import Unpickler
from gpupool.engine.group import ddp_replicas
from gpupool.engine.process import this_rank
from gpupool.engine.shell.shell import this_shell
from gpupool.engine.state_sync.in_place import fits, update
from gpupool.engine.state_sync.pickling import StatePacker

PIECE_BYTES = 64 << 20  # what is on its way at a time: memory beside the state itself


def sync(call: SyncState) -> dict[str, str]:
    """Let names mean on some ranks what they mean on the source; all ranks have to call it.

    Returns:
        What -> why nothing was changed anywhere; empty if all went well. Only the source, and a
        rank that has a problem of its own, reports it.
    """
    here = this_rank().rank
    packer, problems = _packed(call.names) if here == call.source else (None, {})
    wire = _Wire(call.source)
    header = wire.header(packer and _header(packer))
    if header is None:
        return problems
    receives = here in call.ranks
    own = packer.buffers if packer else repeat(None)
    buffers = [
        wire.data(size, buffer, keep=receives)
        for size, buffer in zip(header["sizes"], own, strict=False)
    ]
    values, problems = _read(header, buffers) if receives else ({}, {})
    del buffers
    if not wire.all_well(not problems):
        return problems
    _take_over(values, header["groups"])
    del values, packer
    if header["has_replicas"]:
        ddp_replicas.renew_all()
    return {}


def _packed(names: Sequence[str]) -> tuple[StatePacker | None, dict[str, str]]:
    """The source's state, or name -> why it cannot be sent."""
    space = this_shell().user_ns
    missing = {name: "it has no such variable" for name in names if name not in space}
    if missing:
        return None, missing
    packer = StatePacker()
    for name in names:
        try:
            packer.add(name, space[name])
        except Exception as error:
            return None, {name: why_not(error, space[name], name, _pack_alone)}
    return packer, {}


def _pack_alone(value: object) -> None:
    StatePacker().add("", value)


def _header(packer: StatePacker) -> dict[str, Any]:
    return {
        "stream": packer.stream(),
        "names": packer.names,
        "sizes": [buffer.nbytes for buffer in packer.buffers],
        "readonly": [buffer.readonly for buffer in packer.buffers],
        "groups": packer.groups(),
        "has_replicas": packer.has_replicas,
    }


def _read(
    header: Mapping[str, Any], buffers: Sequence[memoryview]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values by name, or "the state" -> why they cannot be made here."""
    views = [v.toreadonly() if r else v for v, r in zip(buffers, header["readonly"], strict=True)]
    try:
        unpickler = Unpickler(io.BytesIO(header["stream"]), buffers=views)
        made = [unpickler.load() for _ in header["names"]]
    except Exception as error:
        return {}, {"the state": f"{type(error).__name__}: {error}"}
    return dict(zip(header["names"], made, strict=True)), {}


def _take_over(values: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
    """Change in place what the names mean if that can be done for all that belongs together: others
    refer to it. Else the names mean the new values."""
    space = this_shell().user_ns
    for group in groups if values else ():
        stays = all(name in space and fits(space[name], values[name]) for name in group)
        for name in group:
            if not (stays and update(space[name], values[name])):
                space[name] = values[name]


class _Wire:
    """The pool's process group, for data of one rank."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._is_source = dist.get_rank() == source
        # a script may have formed a group that carries nothing but CUDA tensors
        carries_cpu = "cpu:" in dist.get_backend_config()
        self._device = torch.device("cpu") if carries_cpu else cell_names(this_rank())["device"]
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._device)

    def header(self, own: dict[str, Any] | None) -> dict[str, Any] | None:
        """The source's `own`, on every rank."""
        header = [own]
        dist.broadcast_object_list(header, self._source, device=self._device)
        return header[0]

    def data(self, size: int, own: memoryview | None, keep: bool) -> memoryview:
        """The source's `own`, on every rank that keeps it, in memory that may be written to."""
        num_kept = size if keep and not self._is_source else 0
        kept = torch.empty(num_kept, dtype=torch.uint8, device="cpu")
        for start in range(0, size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, size)
            piece = self._piece(end - start)
            if self._is_source and own is not None:
                piece.copy_(torch.from_numpy(np.array(own[start:end], dtype=np.uint8)))
            dist.broadcast(piece, self._source)
            if len(kept):
                kept[start:end].copy_(piece)
        return memoryview(kept.numpy())  # type: ignore[arg-type]

    def all_well(self, here: bool) -> bool:
        """Whether all is well on every rank."""
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    def _piece(self, size: int) -> Tensor:
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._scratch[:size]
