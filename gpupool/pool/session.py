"""The one pool of this notebook, and the GPUs it could have. Runs on the client."""

from __future__ import annotations

import inspect
import os
import threading
from typing import TYPE_CHECKING, Any

from gpupool.core import current
from gpupool.core.errors import NoPoolError, PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.machine.gpus import GpuTable, discover
from gpupool.core.machine.uses import uses
from gpupool.core.options.option_help import Annotation, parameters
from gpupool.core.options.pool_options import PoolOptions, make_options
from gpupool.core.progress import progress as bar
from gpupool.core.wire import environ
from gpupool.pool.notices import Progress, unheard, with_bar

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool

_current: Pool | None = None
_starting = threading.Lock()


def start(profile: str = "local", *, progress: Progress = unheard, **options: Any) -> Pool:
    """Start the pool of this notebook; returns when its process group is formed.

    Args:
        profile: where the engines run; "local" is this machine.
        progress: called with a line of text at each stage.
        options: the fields of `gpupool.PoolOptions`: n, gpus, device, backend, force,
             env, idle_timeout, timeout_s, on_hang, hang_after_s.

    Raises:
        OptionsError, PlacementError: bad input; nothing was started.
        PoolError: a pool runs already, or this is a rank.
        PoolStartError: it did not come up; nothing was left running.
    """
    global _current
    _refuse_on_rank()
    with _starting:
        running = find()
        if running is not None:
            raise PoolError(
                f"a pool of {rank_count(running.world_size)} runs already. Continue with it "
                "(gpupool.current_pool()), or stop it first: `%gpupool stop`."
            )
        for name in ("gpus", "env"):
            if options.get(name) is not None:
                options[name] = _names(options[name])
        if options.get("gpus") == ("all",):  # that is what a pool takes unless it is given some
            options["gpus"] = None
        chosen = make_options(PoolOptions, {"profile": profile, **options})
        from gpupool.pool.pool import Pool  # `%load_ext gpupool` does not wait for it

        with with_bar(progress, "Starting the pool") as stage:
            _current = Pool(chosen, stage)
        return _current


# For help and completion; "profile" is there already.
_own = list(inspect.signature(start).parameters.values())[:-1]
start.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_own, *parameters(PoolOptions)[1:]], return_annotation=Annotation("Pool")
)


def current_pool(create: bool = False) -> Pool:
    """The pool of this notebook.

    Args:
        create: start one with the default options if there is none.

    Raises:
        NoPoolError: there is none and `create` is false.
        PoolError: this is a rank.
    """
    _refuse_on_rank()
    pool = find()
    if pool is not None:
        return pool
    if not create:
        raise NoPoolError(
            f"no pool runs in this notebook{_last_end()}. `%gpupool start` (gpupool.start()) "
            "starts one."
        )
    sentence = started_unasked()
    pool = start_unasked()
    print(sentence.format(describe(pool)))
    return pool


def _refuse_on_rank() -> None:
    """Raise PoolError on a rank, which would start a pool of its own."""
    if current.is_on_rank():
        raise PoolError(
            "this runs on a rank, in a %%spmd cell: call gpupool.train, predict, evaluate, "
            "confusion and start in a cell of the notebook without %%spmd. They use all ranks "
            "there."
        )


def start_unasked(progress: Progress = unheard) -> Pool:
    """Start a pool with the default options, and the keys that this notebook reads its data with.

    Who lists data with a key in the environment and then trains on them wants ranks that can read
    them. Another pool gets keys by `%gpupool env` alone.
    """
    return start(progress=progress, env=environ.used(os.environ))


def started_unasked() -> str:
    """The line for a start that the user did not ask for by name: it takes a moment, and what
    the ranks of an earlier pool had is gone. {} stands for the new pool."""
    keys = ", ".join(environ.used(os.environ))
    sent = f", with {keys} of this notebook, which reads its data with them" if keys else ""
    return f"gpupool: no pool was running{_last_end()}; started {{}}{sent}."


def find() -> Pool | None:
    """The pool of this notebook, or None if none runs."""
    if _current is None or _current.status().state == "stopped":
        return None
    return _current


current.find_pool = find


def stop() -> bool:
    """Stop the pool of this notebook; returns whether there was one."""
    pool = find()
    if pool is not None:
        with bar("Stopping the pool"):
            pool.stop()
    return pool is not None


def describe(pool: Pool) -> str:
    """Size, device and backend in a few words.

    For example "2 ranks on CPU: no NVIDIA driver (gloo)", "8 ranks, one NVIDIA H200 each (nccl)" or
    "3 ranks, 2 with a GPU: NVIDIA H200 (gloo)".
    """
    names = sorted({rank.gpu.name for rank in pool.ranks if rank.gpu})
    num_gpus = sum(rank.gpu is not None for rank in pool.ranks)
    if not names:
        device = f" on CPU: {pool.why_cpu}" if pool.why_cpu else " on CPU"
    elif num_gpus == pool.world_size:
        device = f", one {' or '.join(names)} each"
    else:
        device = f", {num_gpus} with a GPU: {' or '.join(names)}"
    plural = "s" if pool.world_size > 1 else ""
    return f"{pool.world_size} rank{plural}{device} ({pool.backend})"


def _last_end() -> str:
    """Why the last pool of this notebook is no more, in brackets, if there is something to say."""
    reason = _current.status().reason if _current is not None else ""
    return f" (the last one was {reason})" if reason else ""


def _names(value: Any) -> tuple[str, ...]:
    """("0", "2") of "0,2" or [0, 2]."""
    if isinstance(value, (str, int)):
        return tuple(part.strip() for part in str(value).split(","))
    return tuple(map(str, value))


def gpus() -> GpuTable:
    """The GPUs and MIG instances of this machine, as a table: memory, load, who holds them.

    "available": whether a pool of this notebook can use it, and who else does; "selected": which
    rank of it does. What another user or another pool has, a pool uses with `--force` alone.
    """
    found = discover()
    pool = find()
    ranks = pool.ranks if pool is not None else ()
    selected = {rank.gpu.uuid: f"rank {rank.rank}" for rank in ranks if rank.gpu}
    others = uses(found.gpus, list(selected))
    none = f"No GPU: {found.why_none}. {_instead(pool)}"
    return GpuTable(found.gpus, selected, none, others)


def _instead(pool: Pool | None) -> str:
    """The sentence on what a pool without GPUs computes on: that of this notebook, or a new one."""
    if pool is None:
        return "A pool has 2 CPU ranks then, or as many as you like: `%gpupool start -n 4`."
    num_threads = sorted({rank.num_threads for rank in pool.ranks})
    shown = " or ".join(map(str, num_threads))
    threads = "thread" if shown == "1" else "threads"
    ranks = "1 CPU rank" if pool.world_size == 1 else f"{pool.world_size} CPU ranks"
    return f"The pool has {ranks} of {shown} {threads} each."
