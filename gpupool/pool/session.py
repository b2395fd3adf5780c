"""The one pool of this notebook. Runs on the client."""

from __future__ import annotations

from typing import Any

from gpupool.core.errors import NoPoolError, PoolError
from gpupool.core.options import PoolOptions, make_options
from gpupool.pool.engines import Progress
from gpupool.pool.inline import InlinePool
from gpupool.pool.pool import Pool

_current: Pool | None = None


def start(
    profile: str = "local", *, progress: Progress = lambda line: None, **options: Any
) -> Pool:
    """Start the pool of this notebook; returns when its process group is formed.

    Args:
        profile: where the engines run; "local" is this machine.
        progress: called with a line of text at each stage.
        options: the fields of `gpupool.core.options.PoolOptions`: n, gpus, device, backend, env,
            idle_timeout, timeout_s, inline.

    Raises:
        OptionsError, PlacementError: bad input; nothing was started.
        PoolError: a pool runs already.
        PoolStartError: it did not come up; nothing was left running.
    """
    global _current
    running = find()
    if running is not None:
        raise PoolError(
            f"a pool of {running.world_size} ranks runs already. Go on with it "
            "(gpupool.current_pool()), or stop it first: `%gpupool stop`."
        )
    for name in ("gpus", "env"):
        if options.get(name) is not None:
            options[name] = _names(options[name])
    chosen = make_options(PoolOptions, {"profile": profile, **options})
    _current = InlinePool(chosen, progress) if chosen.inline else Pool(chosen, progress)
    return _current


def current_pool(create: bool = False) -> Pool:
    """The pool of this notebook.

    Args:
        create: start one with the default options if there is none.

    Raises:
        NoPoolError: there is none and `create` is false.
    """
    pool = find()
    if pool is not None:
        return pool
    if not create:
        raise NoPoolError(
            "no pool runs in this notebook. `%gpupool start` (gpupool.start()) starts one."
        )
    pool = start()
    # One line, because starting takes seconds and the user did not ask for it by name.
    print(f"gpupool: no pool was running; started {describe(pool)}.")
    return pool


def find() -> Pool | None:
    """The pool of this notebook, or None if none runs."""
    if _current is None or _current.status().state == "stopped":
        return None
    return _current


def stop() -> bool:
    """Stop the pool of this notebook; tells whether there was one."""
    pool = find()
    if pool is not None:
        pool.stop()
    return pool is not None


def describe(pool: Pool) -> str:
    """Size, device and backend in a few words.

    For example "2 ranks on CPU (gloo)" or "8 ranks, one NVIDIA H200 each (nccl)".
    """
    names = sorted({rank.gpu.name for rank in pool.ranks if rank.gpu})
    device = f", one {' or '.join(names)} each" if names else " on CPU"
    plural = "s" if pool.world_size > 1 else ""
    inline = ", inline" if pool.options.inline else ""
    return f"{pool.world_size} rank{plural}{device} ({pool.backend}{inline})"


def _names(value: Any) -> tuple[str, ...]:
    """("0", "2") of "0,2" or [0, 2]."""
    if isinstance(value, (str, int)):
        return tuple(part.strip() for part in str(value).split(","))
    return tuple(map(str, value))
