"""The pool: all engines of this notebook, from start to stop. Runs on the client."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gpupool.core import environ, topology
from gpupool.core.errors import EngineDiedError, OptionsError, PoolError, PoolStartError
from gpupool.core.options import PoolOptions, parse_ranks
from gpupool.core.topology import Rank
from gpupool.pool.client import EngineClient
from gpupool.pool.execution import Execution, OnOutput
from gpupool.pool.launch import Launch, exit_reason
from gpupool.pool.result import OutputRecorder, SpmdResult

_GROUP_TIMEOUT_S = 60.0

Progress = Callable[[str], None]

# Names and globs (never values) that this notebook has propagated: its next pool gets them too.
_remembered_env: dict[str, None] = {}


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool at one moment. `state` is "idle", "busy", "broken" or "stopped"; `reason` why broken.

    `env` maps the names of propagated variables to fingerprints of their values.
    """

    state: str
    reason: str
    backend: str
    generation: int
    ranks: tuple[Rank, ...]
    pids: Mapping[int, int]
    env: Mapping[str, str]
    idle_left_s: float | None


class Pool:
    """One engine per rank, alive until stopped. Made by `gpupool.start`; a context manager."""

    def __init__(self, options: PoolOptions, progress: Progress = lambda line: None) -> None:
        self.options = options
        self.generation = 0
        self._env: dict[str, str] = {}
        self._broken = ""
        self._stopped = False
        self._busy = 0
        self._last_used = time.monotonic()
        self._lock = threading.RLock()
        self._dead: dict[int, str] = {}
        self._open: dict[int, set[Future[Any]]] = {}
        self._num_files = 0
        gpus = [] if options.device == "cpu" else topology.visible_gpus()
        chosen = topology.choose(gpus, options.gpus)
        device = "gpu" if options.gpus else options.device
        self.ranks = tuple(topology.place(chosen, options.n, device, topology.num_usable_cores()))
        self.backend = self._choose_backend()
        variables = {
            **environ.select(_remembered_env, os.environ, strict=False),
            **environ.select(options.env, os.environ),
        }
        self._launch = Launch(self._on_exit)
        try:
            self._client = self._start(progress)
            self.set_environment(variables)
            self._form_group()
        except BaseException:
            self.stop()
            raise
        _stop_at_exit(self)
        threading.Thread(target=self._watch_idle, name="gpupool-idle", daemon=True).start()

    # ---- what a user asks for ------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def run(
        self,
        source_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: str | int | Iterable[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> SpmdResult:
        """Run code on every rank: a piece of source as a cell, or a function called with `args`.

        Returns:
            One value per rank: the last expression's, or what the function returned.

        Raises:
            SpmdError: one or more ranks raised, were interrupted, or took longer than `timeout_s`.
        """
        chosen = self.select_ranks(ranks)
        recorder = OutputRecorder(chosen, self.hidden_values())
        execution = self.begin(
            source_or_function,
            *args,
            ranks=chosen,
            on_output=recorder,
            timeout_s=timeout_s,
            **kwargs,
        )
        replies = execution.result()
        recorder.finish()
        return SpmdResult(replies, recorder.outputs, execution.elapsed_s)

    def begin(
        self,
        source_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: Sequence[int],
        on_output: OnOutput,
        timeout_s: float | None = None,
        cell_number: int | None = None,
        **kwargs: Any,
    ) -> Execution:
        """Start what `run` does and return at once."""
        if isinstance(source_or_function, str):
            name = "run_source"
            payload: dict[str, Any] = {"source": source_or_function, "cell_number": cell_number}
        else:
            import cloudpickle

            name = "run_function"
            payload = {"pickled": cloudpickle.dumps((source_or_function, args, kwargs))}
        return self.execute(name, dict.fromkeys(ranks, payload), on_output, timeout_s)

    def propagate_env(self, *names_or_globs: str, unset: bool = False) -> dict[str, str]:
        """Copy environment variables of the notebook to every rank, present and future.

        The names are remembered: a pool that this notebook starts later gets them too.

        Args:
            names_or_globs: such as "HF_TOKEN" or "AWS_*".
            unset: remove them from the ranks instead.

        Returns:
            Name -> fingerprint of the value; values are never shown.
        """
        if unset:
            names = list(environ.select(names_or_globs, self._env, strict=False))
            self.set_environment({}, unset=names)
            for name in (*names, *names_or_globs):
                _remembered_env.pop(name, None)
            return dict.fromkeys(names, "")
        variables = environ.select(names_or_globs, os.environ)
        self.set_environment(variables)
        _remembered_env.update(dict.fromkeys(names_or_globs))
        return {name: environ.fingerprint(value) for name, value in variables.items()}

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that are busy."""
        self.signal([rank for rank, futures in self._open.items() if futures])

    def status(self) -> PoolStatus:
        """The pool at this moment."""
        state = "stopped" if self._stopped else "broken" if self._broken else "idle"
        if state == "idle" and self._busy:
            state = "busy"
        return PoolStatus(
            state=state,
            reason=self._broken,
            backend=self.backend,
            generation=self.generation,
            ranks=self.ranks,
            pids={r.rank: self._launch.pids.get(f"rank {r.rank}", 0) for r in self.ranks},
            env={name: environ.fingerprint(value) for name, value in self._env.items()},
            idle_left_s=self._idle_left_s(),
        )

    def log(self, rank: int, num_lines: int = 50) -> str:
        """The last lines of an engine's log: what it printed outside of cells."""
        path = self._launch.log_path(f"rank {self.select_ranks(rank)[0]}")
        return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self) -> None:
        """End every process of the pool. May be called again."""
        if self._stopped:
            return
        self._stopped = True
        if hasattr(self, "_client"):
            self._client.close()
        self._launch.stop()
        self._fail_open("the pool was stopped")

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        status = self.status()
        return f"Pool({self.world_size} ranks, {self.backend}, {status.state})"

    # ---- what the folders above build on -------------------------------------------------

    def select_ranks(self, ranks: str | int | Iterable[int] | None) -> tuple[int, ...]:
        """The ranks meant by "all", "0:4", 3, [0, 2] or None (all), in ascending order."""
        if ranks is None:
            return tuple(r.rank for r in self.ranks)
        text = ranks if isinstance(ranks, (str, int)) else ",".join(map(str, ranks))
        return parse_ranks(str(text), self.world_size)

    def execute(
        self,
        name: str,
        payloads: Mapping[int, dict[str, Any]],
        on_output: OnOutput,
        timeout_s: float | None = None,
    ) -> Execution:
        """Call an engine function on several ranks, supervised."""
        self._require_usable()
        return Execution(self, name, payloads, on_output, timeout_s)

    def call(
        self, rank: int, name: str, payload: dict[str, Any], on_output: OnOutput | None = None
    ) -> Future[Any]:
        """Call an engine function on one rank. Fails at once should the engine die meanwhile."""

        def on_message(kind: str, content: Any) -> None:
            if on_output is not None:
                on_output(rank, kind, content)

        with self._lock:
            if rank in self._dead:
                failed: Future[Any] = Future()
                failed.set_exception(EngineDiedError(self._dead[rank]))
                return failed
            self._busy += 1
            future = self._client.call(rank, name, payload, on_message)
            self._open.setdefault(rank, set()).add(future)
        future.add_done_callback(lambda f: self._closed(rank, f))
        return future

    def alive_ranks(self) -> list[int]:
        """The ranks whose engines have not died."""
        return [r.rank for r in self.ranks if r.rank not in self._dead]

    def signal(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to these ranks' engines; one that is idle ignores it."""
        for rank in ranks:
            self._launch.signal(rank)

    def control(self, request: str) -> None:
        """Send a control request to every rank, busy or not."""
        for rank in self.alive_ranks():
            self._client.control(rank, request)

    def new_file(self, name: str) -> Path:
        """A new path in the pool's private folder, which every rank of this host can read."""
        with self._lock:
            self._num_files += 1
            return self._launch.folder / f"{self._num_files}-{name}"

    def hidden_values(self) -> frozenset[str]:
        """The secret values that must not be shown."""
        return environ.secret_values(self._env)

    def set_environment(self, variables: Mapping[str, str], unset: Sequence[str] = ()) -> None:
        """Set and remove variables on every rank, over the signed channel."""
        self._require_usable()
        if not variables and not unset:
            return
        payload = {"variables": dict(variables), "unset": list(unset)}
        self._call_all("set_environment", payload)
        self._env = {k: v for k, v in {**self._env, **variables}.items() if k not in unset}

    def reform_group(self) -> None:
        """Form the group again, one generation higher, if every rank is there to join."""
        if not self._broken and not self._stopped:
            try:
                self._form_group()
            except PoolError as error:
                self.mark_broken(f"the process group could not be formed again: {error}")

    def mark_broken(self, reason: str) -> None:
        """From now on every run is refused with this reason."""
        self._broken = self._broken or reason

    # ---- inside --------------------------------------------------------------------------

    def _choose_backend(self) -> str:
        own_gpus = all(rank.gpu is not None for rank in self.ranks)
        if self.options.backend == "nccl" and not own_gpus:
            raise OptionsError("backend='nccl' needs a GPU for every rank; use 'gloo' or 'auto'.")
        if self.options.backend != "auto":
            return self.options.backend
        return "nccl" if own_gpus else "gloo"

    def _start(self, progress: Progress) -> EngineClient:
        deadline = time.monotonic() + self.options.timeout_s
        self._launch.start_controller()
        self._launch.start_engines(self.ranks)
        progress(f"starting {self.world_size} engines")
        while not self._launch.client_file.exists():
            self._check_start(deadline, "the controller")
            time.sleep(0.02)
        client = EngineClient(self._launch.client_file, max(1.0, deadline - time.monotonic()))
        ready = -1
        while ready < self.world_size:
            if len(client.ranks) > ready:
                ready = len(client.ranks)
                progress(f"{ready} of {self.world_size} engines ready")
            self._check_start(deadline, f"{self.world_size - ready} of the engines")
            time.sleep(0.02)
        self._client = client
        self._call_all("prepare", {"sys_path": [p for p in sys.path if p], "cwd": os.getcwd()})
        return client

    def _check_start(self, deadline: float, missing: str) -> None:
        if self._broken:
            raise PoolStartError(f"{self._broken} Nothing was left running.")
        if time.monotonic() > deadline:
            raise PoolStartError(
                f"{missing} did not come up within {self.options.timeout_s:g} s; nothing was left "
                "running. A larger timeout_s (--timeout) gives a slow machine more time."
            )

    def _form_group(self) -> None:
        generation = self.generation + 1
        store = self.new_file(f"group{generation}")
        payload = {"store_path": str(store), "backend": self.backend}
        for rank, reply in self._call_all("form_group", payload).items():
            if "error" in reply:
                raise PoolStartError(
                    f"the process group was not formed: rank {rank}: {reply['error']['evalue']}"
                )
        self.generation = generation

    def _call_all(self, name: str, payload: dict[str, Any]) -> dict[int, Any]:
        """Call an engine function on every rank and wait; for calls that take a moment."""
        futures = {r.rank: self.call(r.rank, name, payload) for r in self.ranks}
        _, late = wait_futures(futures.values(), timeout=_GROUP_TIMEOUT_S)
        if late:
            ranks = ", ".join(str(r) for r, f in futures.items() if f in late)
            raise PoolError(f"rank {ranks} did not answer {name} within {_GROUP_TIMEOUT_S:.0f} s.")
        return {rank: future.result() for rank, future in futures.items()}

    def _require_usable(self) -> None:
        if self._stopped:
            raise PoolError(
                "this pool was stopped. `%gpupool start` (gpupool.start()) makes a new one."
            )
        if self._broken:
            raise PoolError(
                f"{self._broken} `%gpupool stop`, then `%gpupool start`, makes a new pool."
            )

    def _closed(self, rank: int, future: Future[Any]) -> None:
        with self._lock:
            self._open[rank].discard(future)
            self._busy -= 1
            self._last_used = time.monotonic()

    def _on_exit(self, name: str, status: int, log_tail: str) -> None:
        """A process of ours has ended; called from the agent's reader thread."""
        if self._stopped:
            return
        message = f"{name} {exit_reason(status)}."
        if log_tail:
            message += f" The end of its log:\n{log_tail}\n"
        if name.startswith("rank "):
            rank = int(name.removeprefix("rank "))
            message = f"{message} Its variables are lost."
            with self._lock:
                self._dead[rank] = message
                lost = list(self._open.get(rank, ()))
            self.mark_broken(message)
            for future in lost:
                _fail(future, message)
        else:
            self.mark_broken(message)
            self._fail_open(message)

    def _fail_open(self, message: str) -> None:
        with self._lock:
            lost = [future for futures in self._open.values() for future in futures]
        for future in lost:
            _fail(future, message)

    def _idle_left_s(self) -> float | None:
        limit = self.options.idle_timeout_s
        if limit is None:
            return None
        return limit if self._busy else limit - (time.monotonic() - self._last_used)

    def _watch_idle(self) -> None:
        while not self._stopped:
            left = self._idle_left_s()
            if left is not None and left <= 0:
                self.stop()
                return
            time.sleep(min(1.0, max(0.05, left or 1.0)))


def _fail(future: Future[Any], message: str) -> None:
    if not future.done():
        future.set_exception(EngineDiedError(message))


def _stop_at_exit(pool: Pool) -> None:
    """Stop the pool when the interpreter ends; does not keep it alive until then."""
    reference = weakref.ref(pool)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.stop()

    atexit.register(stop)
