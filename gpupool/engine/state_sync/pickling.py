"""Pickle named state of a rank for other ranks. Runs on engines."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gpupool.core.wire.pickles import Packer
from gpupool.engine.group.ddp_replicas import restore, state_of

# What two names may share so that a change of one is meant to be a change of the other.
_SHARED = (torch.Tensor, torch.UntypedStorage, nn.Module, Optimizer, LRScheduler, list, dict, set)


class StatePacker(Packer):
    """One pickle of several named values: what they share is in it once.

    Afterwards `names` are in their order in it, and `has_replicas` says whether there are DDP
    models.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.has_replicas = False
        self._seen: dict[int, str] = {}  # id -> the first name that has it
        self._joined: dict[str, str] = {}  # name -> one that it shares something with

    def add(self, name: str, value: object) -> None:
        """Add a value. `groups()` and `stream()` are for when all are there.

        Raises:
            Exception: whatever its class raises when it cannot be pickled.
        """
        self.names.append(name)
        self.dump(value)

    def groups(self) -> list[list[str]]:
        """The names in groups that share something."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            found.setdefault(self._root(name), []).append(name)
        return list(found.values())

    def persistent_id(self, obj: Any) -> None:
        """Sees every object, also those that are in the pickle already."""
        if isinstance(obj, _SHARED):
            first = self._seen.setdefault(id(obj), self.names[-1])
            one, other = self._root(first), self._root(self.names[-1])
            if one != other:
                self._joined[other] = one

    def reducer_override(self, obj: Any) -> Any:
        """How a part is pickled."""
        _refuse_shards(obj)
        if isinstance(obj, DistributedDataParallel):
            self.has_replicas = True
            return object.__new__, (type(obj),), state_of(obj), None, None, restore
        return super().reducer_override(obj)

    def _root(self, name: str) -> str:
        while name in self._joined:
            name = self._joined[name]
        return name


def _refuse_shards(obj: object) -> None:
    """Refuse what is a part of a whole: on another rank it would be the wrong part."""
    for module, kind in _SHARDS:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(obj, getattr(loaded, kind)):
            raise TypeError(
                f"a {kind} is this rank's part of something; the other ranks have the other "
                "parts. Load it on all ranks from a checkpoint"
            )


_SHARDS = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
)
