"""What a script written for torchrun finds when it is pasted into a cell. Runs on engines.

Such a script forms the process group, which the pool has done already, and may leave it at its
end; it parses `sys.argv`; it may start its ranks itself. torchrun's variables are set where the
engine is started (`engine_environment` in pool/launchers/processes.py).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
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
from gpupool.engine.group.abort import finish_aborts
from gpupool.engine.process import this_rank

_torch_init = dist.init_process_group
_SIGNATURE = inspect.signature(_torch_init)
_RELEASE = datetime.timedelta(seconds=0.5)  # of remote references takes so long at most
_VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # of torchrun
_ALONE = (
    "A task runs on one rank, which has no process group meanwhile. What all ranks do together is "
    "a %%spmd cell, or pool.run(function)."
)
# How ranks find each other, and on which GPU, is decided here; torch ignores the name.
_DECIDED = ("init_method", "store", "rank", "world_size", "group_name", "device_id")


def install() -> None:
    """Have scripts find what torchrun would give them. Called once, before any of them runs."""
    forming.install()
    sys.argv = ["notebook"]  # without arguments: those of the engine are not the script's
    _replace(_torch_init, functools.wraps(_torch_init)(_init_process_group))
    destroy = dist.destroy_process_group
    _replace(destroy, _destroying(destroy))
    start_processes = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    for launch in (start_processes, launch_agent):
        _replace(launch, _refusing(launch))
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]
    # From its second shutdown on RPC waits for 100 s for a word that does not come: since the first
    # one torch informs no owner that its value is no longer needed (`RRefContext`).
    delete = api._delete_all_user_and_unforked_owner_rrefs  # type: ignore[attr-defined]
    _replace(delete, functools.partial(delete, _RELEASE))
    for name in ("ps1", "ps2"):  # the mark of an interactive Python, by which Lightning refuses
        vars(sys).pop(name, None)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A block that runs on this rank alone, whose peers do other things: no group, no torchrun."""
    __tracebackhide__ = True
    variables = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        with forming.hidden():
            yield
    except (RuntimeError, ValueError) as error:
        if "process group" in str(error):  # torch's own advice is to form one
            error.add_note(_ALONE)
        raise
    finally:
        os.environ.update(variables)


def _init_process_group(*args: Any, **kwargs: Any) -> None:
    """Keep the group that the pool has formed if it is what is asked for, else form that."""
    __tracebackhide__ = True  # not the user's
    if forming.is_hidden:
        raise RuntimeError("init_process_group: no process group is formed here.")
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    # without torch's ways to say nothing
    asked = {name: value for name, value in given.items() if value not in (None, -1, "")}
    for name, here in {"world_size": this_rank().world_size, "rank": this_rank().rank}.items():
        number = int(asked.get(name, os.environ.get(name.upper(), here)))
        if number != here:
            raise ValueError(
                f"init_process_group: {name} {number} is asked for, or set in {name.upper()}, "
                f"and here it is {here}. A group of fewer ranks is "
                "torch.distributed.new_group([0, 1]), a pool of more `%gpupool start -n N`."
            )
    wanted = {name: value for name, value in asked.items() if name not in _DECIDED}
    forming.form_as_asked(wanted, this_rank())


def _destroying(destroy: Callable[..., None]) -> Callable[..., None]:
    """torch's way to destroy a group, once the device is done and no group is being aborted.

    A script does it in `finally`, often just when a peer has failed: what waits for that on the
    device is aborted in a moment, and no communicator bears both at a time.
    """

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        device = devices.in_use()
        while device is not None and not device.is_done():
            time.sleep(0.001)
        finish_aborts()
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
    What a script of `%run` defines it can: `multiprocessing` runs the file again."""
    is_named = isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"
    if not is_named or get_spawning_popen() is None:
        return NotImplemented
    main = sys.modules["__main__"]
    is_of_script = hasattr(main, "__file__") and vars(main).get(value.__qualname__) is value
    return NotImplemented if is_of_script else (pickle.loads, (dumps(value),))


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, other)
