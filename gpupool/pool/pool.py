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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gpupool.core import environ, topology
from gpupool.core.errors import OptionsError, PoolError, PoolStartError
from gpupool.core.options import PoolOptions, parse_ranks
from gpupool.core.topology import Rank
from gpupool.pool.credentials import AWS_NAMES, aws_variables
from gpupool.pool.engines import Engines, Progress, with_log
from gpupool.pool.execution import Execution, OnOutput
from gpupool.pool.protocol import RankEngines
from gpupool.pool.result import OutputRecorder, SpmdResult

# Names (never values) that this notebook has propagated: its next pool gets them too.
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
    inline: bool = False


class Pool:
    """One engine per rank, alive until stopped. Made by `gpupool.start`; a context manager."""

    def __init__(self, options: PoolOptions, progress: Progress = lambda line: None) -> None:
        self.options = options
        self.generation = 0
        self._env: dict[str, str] = {}
        self._broken = ""
        self._log_tail = ""  # of the process whose end broke the pool
        self._stopped = False
        self._at_exit: Callable[[], None] = lambda: None
        gpus = [] if options.device == "cpu" else topology.visible_gpus()
        chosen = topology.choose(gpus, options.gpus)
        device = "gpu" if options.gpus else options.device
        self.ranks = tuple(topology.place(chosen, options.n, device, topology.num_usable_cores()))
        self.backend = self._choose_backend()
        variables = {
            **environ.select(_remembered_env, os.environ, strict=False),
            **environ.select(options.env, os.environ),
        }
        self._engines: RankEngines = self._make_engines()
        try:
            self._engines.start(options.timeout_s, progress)
            payload = {"sys_path": [path for path in sys.path if path], "cwd": os.getcwd()}
            self._engines.call_all("prepare", payload)
            self.set_environment(variables)
            self._form_group()
        except PoolStartError:
            self.stop()
            raise
        except PoolError as error:
            self.stop()
            message = f"the pool did not come up; nothing was left running. {error}"
            raise PoolStartError(message) from None
        except BaseException:
            self.stop()
            raise
        self._at_exit = _stop_at_exit(self)
        if options.idle_timeout_s is not None:
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

    def propagate_env(
        self, *names_or_globs: str, aws: bool = False, unset: bool = False
    ) -> dict[str, str]:
        """Copy environment variables of the notebook to every rank, present and future.

        The names are remembered: a pool that this notebook starts later gets them too.

        Args:
            names_or_globs: such as "HF_TOKEN" or "AWS_*".
            aws: also send what the notebook's own AWS credential chain finds (profile, SSO, role).
            unset: remove the variables from the ranks instead.

        Returns:
            Name -> fingerprint of the value; values are never shown.
        """
        if unset:
            return self._unset_env(names_or_globs)
        variables = environ.select(names_or_globs, os.environ)
        missing: list[str] = []
        if aws:
            variables |= aws_variables()
            missing = [name for name in AWS_NAMES if name not in variables]
        self.set_environment(variables, unset=missing)
        _remembered_env.update(dict.fromkeys(environ.select(names_or_globs, os.environ)))
        return {name: environ.fingerprint(value) for name, value in variables.items()}

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that are busy."""
        self.signal(self._engines.busy_ranks())

    def status(self) -> PoolStatus:
        """The pool at this moment."""
        state = "stopped" if self._stopped else "broken" if self._broken else "idle"
        if state == "idle" and self._engines.busy_ranks():
            state = "busy"
        return PoolStatus(
            state=state,
            reason=self._broken,
            backend=self.backend,
            generation=self.generation,
            ranks=self.ranks,
            pids=self._engines.pids,
            env={name: environ.fingerprint(value) for name, value in self._env.items()},
            idle_left_s=self._idle_left_s(),
            inline=self.options.inline,
        )

    def log(self, rank: int, num_lines: int = 50) -> str:
        """The last lines of an engine's log: what it printed outside of cells."""
        text = environ.redact(self._engines.log(self.select_ranks(rank)[0]), self.hidden_values())
        return "\n".join(text.splitlines()[-num_lines:])

    def stop(self) -> None:
        """End every process of the pool. May be called again."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self._at_exit)
        self._engines.stop()

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
        on_interrupt: Callable[[], None] | None = None,
    ) -> Execution:
        """Call an engine function on several ranks, supervised.

        Args:
            on_interrupt: called at the first Ctrl-C by a pool that works in the caller's thread,
                which then cannot hear it itself; without it the ranks are interrupted.
        """
        self.require_usable()
        return Execution(self, name, payloads, on_output, timeout_s)

    def call(
        self, rank: int, name: str, payload: dict[str, Any], on_output: OnOutput | None = None
    ) -> Future[Any]:
        """Call an engine function on one rank. Fails at once should the engine die meanwhile."""

        def on_message(kind: str, content: Any) -> None:
            if on_output is not None:
                on_output(rank, kind, content)

        return self._engines.call(rank, name, payload, on_message)

    def alive_ranks(self) -> list[int]:
        """The ranks whose engines have not died."""
        return self._engines.alive_ranks()

    def signal(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to these ranks' engines; one that is idle ignores it."""
        self._engines.signal(ranks)

    def control(self, request: str) -> None:
        """Send a control request to every rank, busy or not."""
        self._engines.control(request)

    def new_file(self, name: str) -> Path:
        """A new path in the pool's private folder, which every rank of this host can read."""
        return self._engines.new_file(name)

    def hidden_values(self) -> frozenset[str]:
        """The secret values that must not be shown."""
        return environ.secret_values(self._env)

    def set_environment(self, variables: Mapping[str, str], unset: Sequence[str] = ()) -> None:
        """Set and remove variables on every rank, over the signed channel."""
        self.require_usable()
        if not variables and not unset:
            return
        payload = {"variables": dict(variables), "unset": list(unset)}
        # First, so that whatever goes wrong on a rank is masked already.
        self._env = {k: v for k, v in {**self._env, **variables}.items() if k not in unset}
        for rank, reply in self._engines.call_all("set_environment", payload).items():
            if "error" in reply:
                text = environ.redact(reply["error"]["evalue"], self.hidden_values())
                raise PoolError(f"rank {rank} has the new variables, but: {text}")

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

    def _make_engines(self) -> RankEngines:
        return Engines(self.ranks, self._on_loss)

    def _choose_backend(self) -> str:
        own_gpus = all(rank.gpu is not None for rank in self.ranks)
        if self.options.backend == "nccl" and not own_gpus:
            raise OptionsError("backend='nccl' needs a GPU for every rank; use 'gloo' or 'auto'.")
        if self.options.backend != "auto":
            return self.options.backend
        return "nccl" if own_gpus else "gloo"

    def _form_group(self) -> None:
        generation = self.generation + 1
        store = self.new_file(f"group{generation}")
        payload = {"store_path": str(store), "backend": self.backend}
        for rank, reply in self._engines.call_all("form_group", payload).items():
            if "error" in reply:
                raise PoolStartError(
                    f"the process group was not formed: rank {rank}: {reply['error']['evalue']}"
                )
        self.generation = generation

    def _unset_env(self, names_or_globs: Sequence[str]) -> dict[str, str]:
        names = list(environ.select(names_or_globs, self._env, strict=False))
        self.set_environment({}, unset=names)
        for name in names:
            _remembered_env.pop(name, None)
        return dict.fromkeys(names, "")

    def require_usable(self) -> None:
        """Raise the PoolError that says why nothing can run here, if so."""
        if self._stopped:
            raise PoolError(
                "this pool was stopped. `%gpupool start` (gpupool.start()) makes a new one."
            )
        if self._broken:
            advice = f"{self._broken} `%gpupool stop`, then `%gpupool start`, makes a new pool."
            raise PoolError(with_log(advice, self._log_tail))

    def _on_loss(self, sentence: str, log_tail: str) -> None:
        """A process of ours has ended; called from a background thread."""
        if not self._broken:
            self._log_tail = environ.redact(log_tail, self.hidden_values())
        self.mark_broken(sentence)

    def _idle_left_s(self) -> float | None:
        limit = self.options.idle_timeout_s
        if limit is None:
            return None
        idle_s = time.monotonic() - self._engines.last_used
        return limit if self._engines.busy_ranks() else limit - idle_s

    def _watch_idle(self) -> None:
        while not self._stopped:
            left = self._idle_left_s()
            if left is not None and left <= 0:
                self.stop()
                return
            time.sleep(min(1.0, max(0.05, left or 1.0)))


def _stop_at_exit(pool: Pool) -> Callable[[], None]:
    """Stop the pool when the interpreter ends; does not keep it alive until then.

    What is returned is registered with `atexit`.
    """
    reference = weakref.ref(pool)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.stop()

    return atexit.register(stop)
