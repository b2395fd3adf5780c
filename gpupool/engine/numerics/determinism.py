"""Two trainings from one seed that are equal to the last bit on GPUs. Runs on engines.

    with deterministic(options.deterministic, world) as world:
        fit(..., world=world)

A CPU computes the same each time. On a GPU some kernels add with atomic operations, in the order in
which threads come; cuDNN and cuBLAS may choose another kernel each time; and NCCL's all-reduce
within NVLink's switches (NVLS) adds in no fixed order.

cuBLAS reads CUBLAS_WORKSPACE_CONFIG once in a process. So each engine with a GPU has it from the
start (`engine_environment` in pool/processes/launch.py), which costs some MiB and no time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from gpupool.core.errors import TrainingError
from gpupool.engine.group.forming import TIMEOUT, World, can_bind

_FIXED_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_WITHOUT_NVLS = {"NCCL_ALGO": "^NVLS"}
_CUDNN = torch.backends.cudnn

# The group that was formed for such trainings, and beside which group of all ranks.
_formed: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


@contextmanager
def deterministic(is_asked: bool, world: World) -> Iterator[World]:
    """While this lasts, torch computes the same from the same numbers; in the world that it gives.

    Raises TrainingError, on the rank that meets it, for what torch cannot compute so.
    """
    if not is_asked:
        yield world
        return
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = _CUDNN.deterministic, _CUDNN.benchmark
    try:
        # torch's own switch decides whether cuDNN must be deterministic; benchmark is apart
        torch.use_deterministic_algorithms(True)
        _CUDNN.deterministic, _CUDNN.benchmark = True, False
        with _environment(_FIXED_WORKSPACES):  # of the notebook's own process, if it is the rank
            yield in_one_order(world) if world.backend == "nccl" and world.size > 1 else world
    except RuntimeError as error:
        if not (words := _what_to_do(error)):
            raise
        # the user's line stays in the traceback
        raise TrainingError(words, "not deterministic").with_traceback(
            error.__traceback__
        ) from None
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        _CUDNN.deterministic, _CUDNN.benchmark = cudnn


def in_one_order(world: World) -> World:
    """The same ranks in a group of their own, in which NCCL adds in the same order each time.

    NCCL reads its variable whenever a group is formed, and that of the pool was formed before
    anybody asked. The group is formed once, and left with that of all ranks.
    """
    global _formed
    everyone = dist.group.WORLD
    assert everyone is not None
    if _formed is None or _formed[0] is not everyone:
        # as the group beside it: else torch would choose the device of the communicator
        binds = world.device.type == "cuda" and can_bind()
        with _environment(_WITHOUT_NVLS):
            made = dist.new_group(
                dist.get_process_group_ranks(world.group or everyone),
                timeout=TIMEOUT,
                backend=dist.get_backend_config(world.group),
                use_local_synchronization=world.group is not None,  # other ranks do not train
                device_id=world.device if binds else None,
            )
        assert isinstance(made, dist.ProcessGroup)
        _formed = everyone, made
    return replace(world, group=_formed[1])


@contextmanager
def _environment(names: dict[str, str]) -> Iterator[None]:
    """These variables, inside; what the user has set stays."""
    missing = {name: value for name, value in names.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _what_to_do(error: RuntimeError) -> str:
    """What to say of an operation that torch cannot compute so; "" of another error."""
    operation, found, _ = str(error).partition(" does not have a deterministic implementation")
    if found:
        return (
            f"{operation} differs from run to run: torch has no deterministic implementation of "
            "it. Use another layer or function in its place, or train with deterministic=False."
        )
    if "CUBLAS_WORKSPACE_CONFIG" in str(error):
        return (
            "cuBLAS may differ from run to run in this process. Set the environment variable "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 before the pool starts, or train with "
            "deterministic=False."
        )
    return ""
