"""The one pool of this notebook, and the GPUs it could have. Runs on the client."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from gpupool.core import current
from gpupool.core.errors import NoPoolError, OptionsError, PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.machine.gpus import GpuTable, discover
from gpupool.core.options.fields import with_keywords
from gpupool.core.options.pool_options import PoolOptions
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
        profile: where the engines run; "local" is this machine. Others are "ssh", "slurm", "mpi",
            "kubernetes", "sky" and the tables of gpupool.toml.
        progress: called with a line of text at each stage.
        options: the fields of `gpupool.PoolOptions`.

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
        for name in ("gpus", "env", "hosts"):  # "0,2" or [0, 2]
            if (value := options.get(name)) is not None:
                parts = str(value).split(",") if isinstance(value, (str, int)) else value
                options[name] = tuple(str(part).strip() for part in parts)
        if (words := options.get("words")) is not None:
            options["words"] = tuple(shlex.split(words) if isinstance(words, str) else words)
        if options.get("gpus") == ("all",):  # that is what a pool takes unless it is given some
            options["gpus"] = None
        chosen = PoolOptions(profile=profile, **options)
        from gpupool.pool.pool import Pool  # `%load_ext gpupool` does not wait for it

        with with_bar(progress, "Starting the pool") as stage:
            _current = Pool(chosen, stage)
        return _current


start.__signature__ = with_keywords(start, PoolOptions)  # type: ignore[attr-defined]


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
    if pool is None and not create:
        raise NoPoolError(
            f"no pool runs in this notebook{_last_end()}. `%gpupool start` (gpupool.start()) "
            "starts one."
        )
    if pool is None:
        pool, line = start_unasked()
        print(line)
    return pool


def _refuse_on_rank() -> None:
    """Raise PoolError on a rank, which would start a pool of its own."""
    if current.is_on_rank():
        raise PoolError(
            "this runs on a rank, in a %%spmd cell: call gpupool.train, predict, evaluate, "
            "confusion and start in a cell of the notebook without %%spmd. They use all ranks "
            "there."
        )


def start_unasked(progress: Progress = unheard) -> tuple[Pool, str]:
    """Start a pool with the default options, and the keys that this notebook reads its data with.

    Who lists data with a key in the environment and then trains on them wants ranks that can read
    them. Another pool gets keys by `%gpupool env` alone. The line says that one was started.
    """
    keys, last_end = environ.used(os.environ), _last_end()
    pool = start(progress=progress, env=keys)
    sent = f", with {', '.join(keys)} of this notebook, which reads its data with them"
    line = f"gpupool: no pool was running{last_end}; started {describe(pool)}{sent * bool(keys)}."
    return pool, line


def find() -> Pool | None:
    """The pool of this notebook, or None if none runs."""
    if _current is None or _current.status().state == "stopped":
        return None
    return _current


current.find_pool = find


def stop(*, down: bool = False) -> bool:
    """Stop the pool of this notebook; returns whether there was one.

    Args:
        down: also end the machines that were rented for it, or for the last one.

    Raises:
        OptionsError: none were; nothing was stopped.
        PoolError: the command that ends them failed.
    """
    pool = _current if down else find()  # they outlast it
    if pool is None:
        return False
    line = pool.engines.launch.down if down else ""
    if down and not line:
        raise OptionsError("--down: no machines were rented; `%gpupool stop` ends the pool.")
    with bar("Stopping the pool"):
        pool.stop()
    if line:
        with bar("Ending the machines"):
            # in a session of its own: the notebook's interrupt is not meant for it
            done = subprocess.run(
                shlex.split(line), capture_output=True, text=True, start_new_session=True
            )
        if done.returncode:
            raise PoolError(
                f"the pool was stopped; its machines may run on, and cost. `{line}`: "
                f"{done.stderr.strip()[-500:]}"
            )
    return True


def describe(pool: Pool) -> str:
    """Size, devices and backend in a few words: "8 ranks on NVIDIA H200 (nccl)"."""
    names = sorted({rank.gpu.name if rank.gpu else "CPU" for rank in pool.ranks})
    why_cpu = pool.status().why_cpu
    devices = ", ".join(names) + (f": {why_cpu}" if why_cpu else "")
    return f"{rank_count(pool.world_size)} on {devices} ({pool.backend})"


def _last_end() -> str:
    """Why the last pool of this notebook is no more, in brackets, if there is something to say."""
    reason = _current.status().reason if _current is not None else ""
    return f" (the last one was {reason})" if reason else ""


def gpus() -> GpuTable:
    """The GPUs and MIG instances of this machine, as a table: memory, load, who holds them.

    "available": whether a pool of this notebook can use it, and who else does; "selected": which
    rank of it does. What another user or another pool has, a pool uses with `--force` alone.
    """
    found = discover()
    pool = find()
    ranks = pool.ranks if pool is not None else ()
    selected = {rank.gpu.uuid: f"rank {rank.rank}" for rank in ranks if rank.gpu}
    none = f"No GPU: {found.why_none}. A pool has CPU ranks then: `%gpupool start -n 4`."
    return GpuTable(found.gpus, selected, none)
