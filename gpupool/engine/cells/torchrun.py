"""What a script written for torchrun finds when it is pasted into a cell. Runs on engines.

Such a script forms the process group, which the pool has done already, and may leave it at its
end; it parses `sys.argv`; it may start its ranks itself. torchrun's variables are set where the
engine is started (`engine_environment` in pool/processes/launch.py).
"""

from __future__ import annotations

import datetime
import functools
import inspect
import itertools
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Mapping
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.launcher.api import launch_agent
from torch.distributed.rpc import api

from gpupool.core.wire.reductions import dumps
from gpupool.data import device as devices
from gpupool.engine.group import forming
from gpupool.engine.group.forming import Plan

_torch_init = dist.init_process_group
_rpc: Any = api  # whose private names are not annotated
_SIGNATURE = inspect.signature(_torch_init)
# How ranks find each other is decided here, and torch ignores the name.
_USELESS = datetime.timedelta(seconds=0.5)
_POLL_S = 0.001
_RENDEZVOUS = ("init_method", "rank", "world_size", "group_name")


def install() -> None:
    """Have scripts find what torchrun would give them. Called once, before any of them runs."""
    forming.install()
    sys.argv = ["notebook"]  # without arguments: those of the engine are not the script's
    _replace(_torch_init, functools.wraps(_torch_init)(_init_process_group))
    _replace(dist.split_group, forming.splitting(dist.split_group))
    destroy = dist.destroy_process_group
    _replace(destroy, _destroying(destroy))
    start_processes = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    for launch in (start_processes, launch_agent):
        _replace(launch, _refusing(launch))
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]
    delete = _rpc._delete_all_user_and_unforked_owner_rrefs
    _replace(delete, _waiting_once(delete))
    for name in ("ps1", "ps2"):  # the mark of an interactive Python, by which Lightning refuses
        vars(sys).pop(name, None)


def _init_process_group(*args: Any, **kwargs: Any) -> None:
    """Keep the group that the pool has formed if it is what is asked for, else form that.

    Raises:
        ValueError: rank or world_size are not those of this rank.
    """
    __tracebackhide__ = True  # not the user's
    plan = forming.plan()
    # torch's ways to say nothing
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    asked = {name: value for name, value in given.items() if value not in (None, -1, "")}
    if plan is None:
        _torch_init(**asked)
    elif "store" in asked or asked.get("backend") == "fake":
        forming.form_foreign(asked)
    else:
        _refuse_contradiction(plan, asked)
        wanted = {name: value for name, value in asked.items() if name not in _RENDEZVOUS}
        present = forming.present()
        if present is None or not _fits(wanted, present, plan):
            forming.form_as_asked(plan, wanted)


def _refuse_contradiction(plan: Plan, asked: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    here = {"world_size": plan.world_size, "rank": plan.rank}
    for name, value in here.items():
        number = int(asked.get(name, os.environ.get(name.upper(), value)))
        if number != value:
            source = "is asked for" if name in asked else f"is set in {name.upper()}"
            raise ValueError(
                f"init_process_group: {name} {number} {source}, and here it is {value}. A group of "
                "fewer ranks is torch.distributed.new_group([0, 1]), a pool of more "
                "`%gpupool start -n N`."
            )


def _fits(wanted: Mapping[str, Any], present: Mapping[str, Any], plan: Plan) -> bool:
    """Whether the present group is as good as the one that is wanted."""
    others = set(wanted) - {"backend", "timeout", "device_id"}
    if any(wanted[name] != present.get(name) for name in others):
        return False
    if "timeout" in wanted and wanted["timeout"] != present.get("timeout"):
        return False
    return _has_backend(wanted.get("backend"), present.get("backend")) and _is_own_device(
        wanted.get("device_id"), present.get("device_id"), plan
    )


def _has_backend(wanted: str | None, present: str | None) -> bool:
    """A group that also takes CPU tensors is as good as "nccl" alone."""
    if wanted is None or wanted == present:
        return True
    return (wanted.lower(), present) == ("nccl", "cpu:gloo,cuda:nccl")


def _is_own_device(wanted: Any, present: Any, plan: Plan) -> bool:
    """Whether the group is bound to the device, or would be to no other."""
    if wanted is None or wanted == present:
        return True
    device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
    if device.type == "cpu":
        return plan.backend == "gloo"
    return str(device) == plan.device and plan.backend == "nccl"


def _destroying(destroy: Callable[..., None]) -> Callable[..., None]:
    """torch's way to destroy a group, once the device is done and no group is being aborted.

    A script destroys its group in `finally`: mostly just when a peer has failed. What waits for
    that peer on the device is aborted in a moment, and no communicator bears both at a time.
    """

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        device = devices.in_use()
        while device is not None and not device.is_done():
            time.sleep(_POLL_S)
        forming.require_aborted()
        destroy(*args, **kwargs)

    return destroy_process_group


def _refusing(launch: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of torch's ways to start a function in several processes that are ranks."""
    signature = inspect.signature(launch)

    @functools.wraps(launch)
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        __tracebackhide__ = True
        given = signature.bind(*args, **kwargs).arguments
        name = getattr(given.get("fn", given.get("entrypoint")), "__name__", "_")
        name = "the function" if name.startswith("_") else name  # that of a library's launcher
        raise RuntimeError(
            f"{name} is not started: the ranks of the pool are the processes that it would run in, "
            f"so call {name}(rank, ...) instead, without spawn. Leave out a launcher, too, such as "
            'accelerate\'s notebook_launcher or Lightning\'s strategy="ddp_notebook" ("ddp" works).'
        )

    return refuse


def _by_value(pickler: object, value: Any) -> Any:
    """Have what cells define travel whole to a process that is spawned, which cannot import it.

    What a script of `%run` defines it can: it runs the file again, as `multiprocessing` has it.
    """
    is_named = isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"
    if is_named and get_spawning_popen() is not None and not _is_of_script(value):
        return pickle.loads, (dumps(value),)
    return NotImplemented


def _is_of_script(value: Any) -> bool:
    main = sys.modules["__main__"]
    return hasattr(main, "__file__") and getattr(main, value.__qualname__, None) is value


def _waiting_once(delete: Callable[..., None]) -> Callable[..., None]:
    """RPC's way to release remote references, which is of no use from its second shutdown on.

    Since the first one torch informs no owner that its value is no longer needed (`RRefContext`),
    and the owner waits for that word for 100 s, in C++. Others give it up after 60 s.
    """
    waits = itertools.chain([()], itertools.repeat((_USELESS,)))

    @functools.wraps(delete)
    def deleting(*args: Any) -> None:
        delete(*args, *(next(waits) if not args else ()))

    return deleting


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put another function in its place in every module that has imported it."""
    for module in list(sys.modules.values()):
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, other)
