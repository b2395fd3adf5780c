"""The pool: all engines of this notebook, from start to stop. Runs on the client."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpupool.core.errors import PoolError, PoolStartError
from gpupool.core.formatting import rank_count
from gpupool.core.machine.topology import Rank
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.progress import progress as show_progress
from gpupool.core.wire.calls import RunSource
from gpupool.core.wire.masking import redact
from gpupool.core.wire.output import OnOutput
from gpupool.core.wire.replies import CodeReply
from gpupool.pool.calls import presses
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder, SpmdResult
from gpupool.pool.engines.client import plain_client
from gpupool.pool.engines.engines import with_log
from gpupool.pool.environment.environment import variables_at_start
from gpupool.pool.notices import OnNotice, Progress, unheard
from gpupool.pool.ranks import Ranks
from gpupool.pool.status import FOR_USERS, HostInfo, PoolStatus
from gpupool.pool.tasks import OnReport, Task, TaskExecutor, Tasks
from gpupool.pool.upkeep.forming import network_of
from gpupool.pool.variables.composite import Composite
from gpupool.pool.variables.variables import Variables


class Pool(Ranks):
    """One engine per rank, alive until stopped. Made by `gpupool.start`; a context manager."""

    def __init__(self, options: PoolOptions, progress: Progress = unheard) -> None:
        super().__init__(options)
        self._listeners: list[Callable[[PoolStatus], None]] = []
        self._client: Any = None  # that of the user
        self.variables = Variables(self)
        self.on_lost = self.variables.not_there
        self.on_replaced = self.variables.forget_rank
        self.hint = self.variables.losses.hint
        self.tasks = Tasks(self, self.variables)
        try:
            self._start(variables_at_start(options.env), progress)
        except BaseException as error:
            # of a rank that has died: how, and not what would become of it in a pool that is up
            _, reason, log_tail = self.trouble
            self.stop()
            if not isinstance(error, PoolError):
                raise
            reason = with_log(reason, log_tail) or redact(str(error), self.secrets)
            message = f"the pool did not come up, and nothing was left running: {reason}"
            raise PoolStartError(message, ranks=error.ranks) from None
        atexit.register(self._stop_at_exit)
        threading.Thread(target=self._watch, name="gpupool-pool", daemon=True).start()

    # ---- what a user asks for ------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """What each rank is: its device, its cores."""
        return self.placement.ranks

    @property
    def backend(self) -> str:
        """That of the group of all ranks."""
        return self.placement.backend

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
        __tracebackhide__ = True  # IPython and pytest leave such frames out
        chosen = self.select(ranks)
        recorder = OutputRecorder(chosen, self.secrets)
        execution = self.begin(
            source_or_function,
            *args,
            ranks=chosen,
            on_output=recorder,
            timeout_s=timeout_s,
            **kwargs,
        )
        try:
            replies = execution.result()
        finally:
            recorder.finish()
        return SpmdResult(replies, recorder.outputs, execution.elapsed_s)

    def begin(
        self,
        source_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: Sequence[int],
        on_output: OnOutput,
        timeout_s: float | None = None,
        on_notice: OnNotice | None = None,
        **kwargs: Any,
    ) -> Execution[CodeReply]:
        """Start what `run` does and return at once.

        `on_notice` hears what the user should know while it runs; without it that is on stderr.
        """
        if not isinstance(source_or_function, str):
            kept = self.variables.keep_call((source_or_function, args, kwargs))
            return self.variables.begin_call(kept, ranks, on_output, timeout_s, on_notice)
        calls = dict.fromkeys(ranks, RunSource(source_or_function, None))
        return Execution(self, calls, on_output, timeout_s, on_notice)

    def submit(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        retries: int = 0,
        on_report: OnReport | None = None,
        **kwargs: Any,
    ) -> Task:
        """Run `fn(*args, **kwargs)` on the next rank that is free; returns at once.

        The function and what it reads travel as with `run`, as they are now; it finds `rank` and
        `device` as a cell does. It is alone on its rank: there is no process group.

        Args:
            retries: how often it is tried again, should its rank die.
            on_report: called, in a thread, with what it tells by `gpupool.report`.

        Returns:
            A `concurrent.futures.Future` with `rank`, `text`, `reports` and `interrupt()`.

        Raises:
            OptionsError: `fn` is no function.
            TransferError: a part of it cannot be sent.
        """
        __tracebackhide__ = True
        return self.tasks.submit((fn, args, kwargs), retries, on_report)

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        ordered: bool = True,
        retries: int = 0,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        """`fn` of each item, as the built-in `map`, on all ranks at once, each with one at a time.

        The input may be endless: one item per rank is read ahead. An error ends it, as does a stop:
        what waits is cancelled, what runs is interrupted.

        Args:
            ordered: the values come in the order of the input; else as soon as they are there.
            retries: how often an item is tried again whose rank has died.
            return_exceptions: give errors in the place of values.

        Raises:
            SpmdError: it has failed, or its rank has died.
        """
        __tracebackhide__ = True
        sizes = [len(one) for one in iterables if isinstance(one, Sized)]
        items = zip(*iterables, strict=False)  # as the built-in map
        num_ahead = 2 * len(self.training_ranks)  # one runs on each rank, and one waits
        name, row = getattr(fn, "__name__", "map"), deque[Task]()
        with show_progress(name, min(sizes, default=None), "tasks") as bar:
            try:
                while True:
                    for args in itertools.islice(items, num_ahead - len(row)):
                        row.append(self.tasks.submit((fn, args, {}), retries))
                    if not row:
                        return
                    waited = [row[0]] if ordered else row
                    first: Any = wait(waited, return_when=FIRST_COMPLETED).done.pop()
                    error = first.exception()
                    row.remove(first)
                    bar.advance()
                    if error is not None and not return_exceptions:
                        raise error
                    yield first.result() if error is None else error
            except KeyboardInterrupt:
                presses.ignore_for_a_moment()
                raise
            finally:  # an error, a stop, or nobody wants the rest
                for task in row:
                    task.interrupt()
                wait(row)

    @property
    def executor(self) -> Executor:
        """The ranks as a `concurrent.futures.Executor`, for libraries. To shut it down is to wait
        for its tasks; the pool lives on."""
        return TaskExecutor(self.tasks)

    def propagate_env(
        self, *names_or_globs: str, aws: bool = False, unset: bool = False
    ) -> dict[str, str]:
        """Copy environment variables of the notebook to every rank, present and future.

        The names are remembered: a pool that this notebook starts later gets them too.

        Args:
            names_or_globs: such as "HF_TOKEN" or "AWS_*".
            aws: also send what the notebook's own AWS credential chain finds (profile, SSO, role),
                and again before it expires, for as long as the pool lives.
            unset: remove the variables from the ranks instead.

        Returns:
            Name -> fingerprint of the value; values are never shown.
        """
        self.wait_until_usable()
        if unset:
            return dict.fromkeys(self.environment.unset(names_or_globs), "")
        return self.environment.propagate(names_or_globs, aws)

    def __getitem__(self, name: str) -> Composite:
        return self.variables.handles.get(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.variables.set(name, value)

    def put(self, value: object) -> Any:
        """Bring a big value to every rank, once: `data = pool.put(data)`.

        In a cell the name then means the value itself. The ranks of a host share its memory, until
        one of them writes to it.

        Returns:
            A `Constant`; the ranks release the value with it.

        Raises:
            TransferError: it cannot be sent.
        """
        return self.variables.put(value)

    @property
    def connection_file(self) -> str:
        """The file with which an `ipyparallel.Client` connects, in any process of the same user."""
        self.wait_until_usable()
        return str(self.engines.launch.client_file)

    @property
    def client(self) -> Any:
        """An `ipyparallel.Client` of this pool: for views, `%px`, `load_balanced_view().map`.

        Engine ids are ranks. It is made when it is first asked for, and closed with the pool.
        """
        connection_file = self.connection_file
        self._client = self._client or plain_client(Path(connection_file))
        return self._client

    def interrupt(self, calls: Collection[int] | None = None) -> bool:
        """Raise KeyboardInterrupt in what runs on the ranks.

        A training is asked to stop and to keep its network the first time.

        Args:
            calls: only those of these numbers, as in `status().calls`: what has begun since then is
                left alone.

        Returns:
            Whether any of it still ran.
        """
        running = {number for _, number in self.engines.running()}
        chosen = running if calls is None else running.intersection(calls)
        found = [one for number, one in list(self.supervised.items()) if number in chosen]
        if any(one.is_task for one in found):
            self.tasks.stop()
        for execution in found:
            if execution.ends_well is not None:
                end_well, execution.ends_well = execution.ends_well, None
                end_well()
            else:  # it also aborts the collectives that ranks wait in
                execution.interrupt()
        return bool(found)

    def sync_from(
        self, rank: int, *names: str, ranks: str | int | Iterable[int] | None = None
    ) -> tuple[int, ...]:
        """Give names on every other rank, or on `ranks`, the meaning they have on `rank`: after a
        rank was replaced, `pool.sync_from(0, "model", "optimizer", "scheduler")`.

        Name together what belongs together: it stays so. Modules, optimizers, schedulers and
        tensors are changed in place if all of them fit, so that whatever refers to them sees it;
        else the names are bound to copies. Gradients and the state of random generators are not
        copied.
        DistributedDataParallel models get fresh buckets on all ranks, also on `rank`.

        Returns:
            The ranks that have it now; none where there is no other rank.

        Raises:
            OptionsError: no name, or `ranks` are not others than `rank`.
            PoolError: the rank has no such variable, or it cannot be copied; nothing was changed.
            SpmdError: a rank failed, or cannot read it, or the user interrupted.
        """
        return self.variables.sync(rank, names, ranks)

    def status(self) -> PoolStatus:
        """The pool at this moment."""
        placed = self.placement
        return PoolStatus(
            state=self.state,
            reason=self.trouble.reason,
            backend=placed.backend,
            generation=self.group.generation,
            ranks=placed.ranks,
            pids=self.engines.pids,
            env=self.environment.fingerprints,
            idle_left_s=self._idle_left_s(),
            idle_timeout_s=self.options.idle_timeout_s,
            training_ranks=placed.training_ranks,
            training_backend=placed.training_backend,
            why_cpu=placed.why_cpu,
            replaced_after=self.turns.mending_waits_for,
            credentials=self.environment.credentials,
            calls=tuple(sorted({n for _, n in self.engines.running() if n is not None})),
        )

    def hosts(self) -> tuple[HostInfo, ...]:
        """The hosts of the pool at this moment; none where all its ranks are on this machine."""
        hosts = self.engines.launch.hosts()
        logs = {one.host: self.log(one.rank, 10_000) for one in self.ranks if one.local_rank == 0}
        return tuple(replace(one, nccl=network_of(logs[one.name])) for one in hosts)

    def add_listener(self, listener: Callable[[PoolStatus], None]) -> None:
        """Call `listener(status)` when the pool breaks or is mended, stops soon or has stopped.

        It is called in a background thread. A listener that is added again is called once.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def log(self, rank: int, num_lines: int = 50) -> str:
        """The last lines of an engine's log: what it printed outside of cells."""
        text = self.engines.log(self.select(rank)[0])
        return "\n".join(text.splitlines()[-num_lines:])

    def stop(self, reason: str = "") -> None:
        """End every process of the pool. May be called again.

        Args:
            reason: what the status says from then on.
        """
        with presses.ignored():  # it would be half stopped, and not be stopped again
            if not self.engines.stopped:
                self._why_stopped = reason
            self.environment.close()
            if not self.engines.stop():
                return
            atexit.unregister(self._stop_at_exit)  # which keeps it alive
            if self._client is not None:
                self._client.close(linger=0)
            self.variables.buffers.clear()
        self._tell_listeners()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Pool({rank_count(self.world_size)}, {self.backend}, {self.state})"

    def __dir__(self) -> list[str]:
        return list(FOR_USERS)

    # ---- inside --------------------------------------------------------------------------

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            try:
                listener(self.status())
            except Exception:  # a picture that cannot be drawn must not keep an idle pool alive
                logging.getLogger("gpupool").exception("a listener of the pool failed")

    def _idle_left_s(self) -> float | None:
        limit = self.options.idle_timeout_s
        # A rank that was given up is busy for ever; that must not keep a broken pool.
        if limit is None or (self.engines.running() and not self.trouble.kind):
            return limit
        return limit - (time.monotonic() - self.engines.last_used)

    def _stop_at_exit(self) -> None:
        self._listeners.clear()  # what they draw on is going away, too
        self.stop()

    def _watch(self) -> None:
        """Tell what becomes of the pool, and stop it when nobody has used it for long."""
        told: tuple[str, bool] = ("", False)
        while (status := self.status()).state != "stopped":
            if told != (status.reason, status.stops_soon):
                told = status.reason, status.stops_soon
                self._tell_listeners()
            left = 1.0 if status.idle_left_s is None else status.idle_left_s
            if left <= 0:
                self.stop(f"stopped after {self.options.idle_timeout} without use")
            time.sleep(min(1.0, max(0.05, left)))
