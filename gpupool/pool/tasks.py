"""Many tasks at once, each on one rank: submit, map, and an executor for libraries. On the client.

A thread for each rank that has something to do takes the next task of the row, runs it there and
waits for its end. So a rank has one task at a time, and the next one when it is free; cells on all
ranks take their turn in between. No task outlives the notebook.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple
from weakref import WeakSet

from gpupool.core.errors import EngineDiedError, ParcelsLostError, SpmdError
from gpupool.core.options import checks
from gpupool.core.wire.events import ReportEvent
from gpupool.core.wire.output import OutputKind
from gpupool.core.wire.pickles import unpack
from gpupool.core.wire.replies import CodeReply
from gpupool.core.wire.requests import Stop
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder
from gpupool.pool.calls.presses import ignore_for_a_moment
from gpupool.pool.ranks import Ranks
from gpupool.pool.variables.parcels import KeptCall
from gpupool.pool.variables.variables import Variables

_NUM_RESENDS = 3


class Report(NamedTuple):
    """What a task has reported: its step, the values, and the seconds since it began."""

    step: int
    values: dict[str, float]
    elapsed_s: float


OnReport = Callable[[Report], None]


class Task(Future[Any]):
    """A function that runs on one rank, or will: a future, made by `pool.submit`.

    `rank` is where it runs, or ran last; `reports` what it has told by `gpupool.report`. Its
    exception is an SpmdError with the error of its rank.
    """

    def __init__(
        self, tasks: Tasks, kept: KeptCall, retries: int, on_report: OnReport | None
    ) -> None:
        super().__init__()
        self.rank: int | None = None
        self.reports: list[Report] = []
        self._tasks, self._on_report = tasks, on_report
        self._tries_left = {
            EngineDiedError.__name__: retries,
            ParcelsLostError.__name__: _NUM_RESENDS,  # its rank was new, and had nothing yet
        }
        self._kept: KeptCall | None = kept  # until it has ended
        self._execution: Execution[CodeReply] | None = None
        self._recorder: OutputRecorder | None = None
        self._took_s = 0.0  # when it has ended
        self._num_told = 0  # reports that `on_report` has heard of
        self._ends = False  # it is to be interrupted, also if it has not begun

    @property
    def text(self) -> str:
        """What it has printed so far."""
        recorder, rank = self._recorder, self.rank
        return "" if recorder is None or rank is None else recorder.text(rank)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began on its rank, until its end; 0 before."""
        execution = self._execution
        if execution is None or execution.waits_for:
            return self._took_s
        return time.monotonic() - execution.started_at

    def result(self, timeout: float | None = None) -> Any:
        """What the function has returned, after waiting for it.

        Ctrl-C (the notebook's stop button) meanwhile ends all tasks of the pool: those that wait
        are cancelled, those that run are interrupted.

        Raises:
            SpmdError: it has failed, or its rank has died.
            CancelledError: it was cancelled.
            TimeoutError: it still runs after `timeout` seconds, and continues.
        """
        __tracebackhide__ = True
        try:
            return super().result(timeout)
        except KeyboardInterrupt:
            ignore_for_a_moment()
            self._tasks.stop()
            raise

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in it; if it has not begun, it is cancelled. Returns at once."""
        self._ends = True
        execution = self._execution
        if not self.cancel() and execution is not None:
            execution.interrupt()

    def prune(self) -> None:
        """Have its next `gpupool.report` raise `gpupool.Pruned`."""
        execution, rank = self._execution, self.rank
        if execution is not None and rank is not None:
            self._tasks.all_ranks.engines.control(Stop(str(execution.number)), [rank])

    # ---- in the thread of its rank -------------------------------------------------------

    def _run_on(self, rank: int) -> None:
        assert self._kept is not None
        if not self.set_running_or_notify_cancel():
            return
        all_ranks, variables, again = self._tasks.all_ranks, self._tasks.variables, True
        while again:
            value, error, again = None, None, False
            self.rank, self.reports, self._num_told = rank, [], 0
            self._recorder = recorder = OutputRecorder((rank,), all_ranks.secrets, self._on_output)
            try:
                self._execution = variables.begin_task(self._kept, rank, recorder)
                if self._ends:
                    self._execution.interrupt()
                self._execution.run(self._tell)
                reply = self._execution.result()[rank]
                value = unpack(reply.packed) if reply.packed else None
            except BaseException as raised:
                error = raised.with_traceback(None)  # no frame of ours is of use
                name = raised.first.ename if isinstance(raised, SpmdError) else ""
                if not self._ends and name in self._tries_left:
                    self._tries_left[name] -= 1
                    again = self._tries_left[name] >= 0
        recorder.finish()
        self._tell()
        self._took_s = self.elapsed_s
        self._kept = self._execution = None
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(value)

    def _on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        for event in content if kind is OutputKind.EVENTS else ():
            if isinstance(event, ReportEvent):
                self.reports.append(Report(event.step, event.values, self.elapsed_s))

    def _tell(self) -> None:
        """Tell `on_report` what is new: here, as it may take its time."""
        while self._on_report is not None and self._num_told < len(self.reports):
            self._num_told += 1
            try:
                self._on_report(self.reports[self._num_told - 1])
            except Exception:  # the task is not to blame
                self._on_report = None
                logging.getLogger("gpupool").exception("on_report of a task has failed; it ends")


class Tasks:
    """The tasks of a pool: the row of those that wait, and those that run."""

    def __init__(self, all_ranks: Ranks, variables: Variables) -> None:
        self.all_ranks, self.variables = all_ranks, variables
        self._lock = threading.Lock()
        self._row: deque[Task] = deque()
        self._running: dict[int, Task | None] = {}  # rank -> of those that have a thread

    def submit(
        self,
        call: tuple[Callable[..., Any], Sequence[Any], dict[str, Any]],
        retries: int = 0,
        on_report: OnReport | None = None,
    ) -> Task:
        """Put a (function, args, kwargs) into the row: see `Pool.submit`."""
        __tracebackhide__ = True
        checks.any_function("fn", call[0])
        checks.number(whole=True, least=0)("retries", retries)
        task = Task(self, self.variables.keep_call(call), retries, on_report)
        with self._lock:
            self._row.append(task)
            ranks = self.all_ranks.training_ranks
            free = [rank for rank in ranks if rank not in self._running]
            if free:
                self._running[free[0]] = None
                name = f"gpupool-task-{free[0]}"
                threading.Thread(target=self._serve, args=free[:1], name=name, daemon=True).start()
        return task

    def stop(self) -> None:
        """Cancel what waits and interrupt what runs; returns at once."""
        with self._lock:
            found = [*self._row, *filter(None, self._running.values())]
        for task in found:
            task.interrupt()

    def _serve(self, rank: int) -> None:
        while True:
            with self._lock:
                if not self._row:
                    del self._running[rank]
                    return
                self._running[rank] = task = self._row.popleft()
            task._run_on(rank)
            del task  # and what it holds


class TaskExecutor(Executor):
    """The ranks of a pool for libraries that want a `concurrent.futures.Executor`."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._max_workers = len(tasks.all_ranks.training_ranks)  # libraries look for this name
        self._submitted: WeakSet[Task] = WeakSet()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Task:
        task = self._tasks.submit((fn, args, kwargs))
        self._submitted.add(task)
        return task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for what was submitted. The pool lives on, and takes more."""
        submitted = [*self._submitted]
        for task in submitted if cancel_futures else ():
            task.cancel()
        if wait:
            wait_for(submitted)
