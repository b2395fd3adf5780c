"""DistributedDataParallel models over a group that was formed again. Runs on engines; knows only
torch.

A fresh wrapper agrees with the other ranks on its buckets (a collective) in its first backward, one
that has trained already does not: a mixture of both waits for ever. So all ranks get fresh ones.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# What belongs to the process: recreated where the state arrives.
_OWN = ("process_group", "reducer", "logger")
# Of a static graph: whether the first backward, which learns its order, has been.
_LEARNT = "_static_graph_delay_allreduce_enqueued"


def state_of(model: DistributedDataParallel) -> dict[str, Any]:
    """What a wrapper is made of, for `restore`; its group may be one that exists no more.

    Raises a RuntimeError if it is not over all ranks, or other parameters are trained by now.
    """
    trained, _ = model._build_params_for_reducer()
    made_of = model._get_ddp_logging_data()["num_parameter_tensors"]
    # A wrapper that is made now would never sum the gradients of those that are frozen.
    if model.process_group.size() != dist.get_world_size() or len(trained) != made_of:
        raise RuntimeError(
            "a DistributedDataParallel over some of the ranks, or with parameters that were frozen "
            "or unfrozen since it was made, cannot be made again here: copy its .module, and wrap "
            "that again"
        )
    return {key: value for key, value in vars(model).items() if key not in _OWN}


def restore(model: DistributedDataParallel, state: Mapping[str, Any]) -> None:
    """Make a wrapper of its state, over the present group."""
    for key in _OWN:  # first: with the old reducer go its hooks on the parameters
        vars(model).pop(key, None)
    model.__setstate__({**state, _LEARNT: False})
    for hook, hook_state in model._comm_hooks:  # they were the old reducer's
        dist._register_comm_hook(model.reducer, hook_state, hook)  # type: ignore[attr-defined]


def renew_all() -> None:
    """Give every wrapper over all ranks that lives in this process the present group, and fresh
    buckets. Those of which `state_of` raises stay as they are."""
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    referrers = gc.get_referrers(*kinds)  # an object refers to its class
    for model in (one for one in referrers if issubclass(type(one), DistributedDataParallel)):
        with contextlib.suppress(Exception):  # a class of the user's may do anything
            restore(model, state_of(model))
