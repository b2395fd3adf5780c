"""Named state of one rank for the others. Runs on engines.

It is one pickle: what the values share (an optimizer's parameters are the model's) stays shared.
Where all of it fits what a rank has, that is changed in place, as others may refer to it: an
optimizer to parameters, a scheduler to its optimizer, DDP to its module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gpupool.core.wire.pickles import Packed, Packer, to_wire, why_not
from gpupool.core.wire.replies import Reply
from gpupool.engine.cells.variables import load, out_file
from gpupool.engine.group import ddp_replicas
from gpupool.engine.process import this_rank
from gpupool.engine.shell import this_shell

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
# What is a part of a whole: on another rank it would be the wrong part.
_SHARDS = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
)


class _StatePacker(Packer):
    def reducer_override(self, obj: Any) -> Any:
        for module, kind in _SHARDS:
            loaded = sys.modules.get(module)
            if loaded is not None and isinstance(obj, getattr(loaded, kind)):
                raise TypeError(
                    f"a {kind} is this rank's part of something; the other ranks have the other "
                    "parts. Load it on all ranks from a checkpoint"
                )
        if isinstance(obj, DistributedDataParallel):
            state = ddp_replicas.state_of(obj)
            return object.__new__, (type(obj),), state, None, None, ddp_replicas.restore
        return super().reducer_override(obj)


def fetch(names: Sequence[str], out_path: str) -> Packed:
    """What these names mean here, written to the file; an error says what cannot be copied."""
    space = this_shell().user_ns
    for name in names:
        if name not in space:
            raise LookupError(f"rank {this_rank().rank} has no variable {name!r}")
    state = {name: space[name] for name in names}
    packer = _StatePacker()
    try:
        packer.dump(state)
    except Exception as error:  # whatever its class raises
        pack = lambda part: _StatePacker().dump(part)  # noqa: E731
        raise TypeError(why_not(error, state, "state", pack)) from None
    return to_wire(packer.stream(), packer.buffers, out_file(out_path))


def take_over(packed: Packed | None) -> Reply[None]:
    """Let names mean what they mean on the rank that has `packed` it; None: this one keeps its own.
    All ranks call it, as DDP models get fresh buckets on all of them."""
    space = this_shell().user_ns
    state = load(packed, {}) if packed is not None else {}
    held = {name: value for name, value in state.items() if not _is_plain(value)}
    if all(name in space and _outline(space[name]) == _outline(held[name]) for name in held):
        for name in held:
            _update(space[name], state.pop(name))
    space.update(state)
    ddp_replicas.renew_all()
    return Reply(None)


def _is_plain(value: object) -> bool:
    """Whether nothing refers to parts of it that would have to stay the same."""
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _outline(obj: Any) -> Any:
    """What has to be the same on both sides for `_update`; what that cannot change equals none."""
    # By its name: a class of the notebook is another object on every rank.
    kind = type(obj).__module__, type(obj).__qualname__
    if isinstance(obj, Tensor):
        return kind, obj.shape, obj.dtype, obj.layout, obj.device, obj.is_leaf
    if isinstance(obj, nn.Module):
        own = [*obj.named_parameters(recurse=False), *obj.named_buffers(recurse=False)]
        return kind, [(name, _outline(part)) for name, part in (*own, *obj.named_children())]
    if isinstance(obj, Optimizer):
        groups = obj.param_groups
        return kind, [[(p.shape, p.dtype) for p in group["params"]] for group in groups]
    return kind if isinstance(obj, LRScheduler) else object()


def _update(old: Any, new: Any) -> None:
    with torch.no_grad():
        if isinstance(old, Tensor):
            old.copy_(new)
            return
        old.load_state_dict(new.state_dict())
        if not isinstance(old, nn.Module):
            return
        # The buffers that are not part of its state; whether it trains, and plain attributes.
        for buffer, other in zip(old.buffers(), new.buffers(), strict=True):
            buffer.copy_(other)
    for parameter, other in zip(old.parameters(), new.parameters(), strict=True):
        parameter.requires_grad_(other.requires_grad)
    for mine, others in zip(old.modules(), new.modules(), strict=True):
        # The numbers of a DDP wrapper are about its own buckets.
        keys = ["training"] if isinstance(mine, DistributedDataParallel) else vars(others)
        for key in keys:
            if isinstance(value := getattr(others, key), _PLAIN):
                setattr(mine, key, value)
