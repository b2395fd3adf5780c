"""A cell on the ranks: start it, let a view watch, take the result. Runs on the client."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from gpupool.core.errors import SpmdError, StillRunningError
from gpupool.core.wire.calls import RunSource
from gpupool.core.wire.events import MonitorEvent
from gpupool.core.wire.output import OutputKind
from gpupool.core.wire.requests import Stop
from gpupool.core.wire.values import Bindings
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder, RankOutput, SpmdResult
from gpupool.pool.calls.presses import ignore_for_a_moment
from gpupool.pool.notices import OnNotice
from gpupool.pool.variables.composite import Composite
from gpupool.pool.variables.parcels import Shipment
from gpupool.spmd.capture import CellNames, names_in_cell

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool

VIEWS = ("auto", "quiet")
_STOPPING = "The loop ends after its next report. The notebook's stop button interrupts it at once."
_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")


@dataclass(frozen=True, slots=True)
class CellReport:
    """How a finished cell went. Either `result` or `error` is there."""

    outputs: Mapping[int, RankOutput]
    elapsed_s: float
    result: SpmdResult | None = None
    error: SpmdError | None = None
    cell_number: int | None = None


States = Callable[[], Mapping[int, str]]  # rank -> "running", "in all_reduce" or "done"


class View(Protocol):
    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """A piece of output; called in a background thread."""

    def notice(self, text: str | None) -> None:
        """What the user should know now; None: it is over. Called in a background thread."""

    def tick(self, states: States = dict) -> None:
        """Called every 0.1 s in the waiting thread; `states` gives what each rank does."""

    def finish(self, report: CellReport) -> None:
        """The end; called in the waiting thread."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """The namespace where a cell's variables come from and go to. `transform` makes Python of
    IPython's syntax. With `at_once` the names that the cell assigns are bound when it starts, not
    when its result is asked for."""

    names: dict[str, Any]
    transform: Callable[[str], str]
    at_once: bool = False


class SpmdRun:
    """A cell that runs on the ranks: a future. `await run` gives its result in an async cell.

    Without a `notebook` no variable travels, in either direction. Unless it `waits_for_gpu` it ends
    when its code does. While somebody waits for it, `stop_wish` being set ends a loop that heeds
    it. `on_notice` hears of hangs and the like in the place of the view.
    """

    def __init__(
        self,
        pool: Pool,
        source: str,
        ranks: Sequence[int],
        view: View,
        *,
        timeout_s: float | None = None,
        cell_number: int | None = None,
        notebook: Notebook | None = None,
        stop_wish: threading.Event | None = None,
        waits_for_gpu: bool = True,
        on_notice: OnNotice | None = None,
    ) -> None:
        self._pool, self._ranks, self._view = pool, tuple(ranks), view
        self._stop_wish = stop_wish or threading.Event()
        self._notebook, self._cell_number = notebook, cell_number
        self.name = f"cell In[{cell_number}]" if cell_number else "a cell"
        self.asked = False  # whether anyone has waited for the result
        self._outcome: CellReport | None = None
        # Numbers of loops that run and ask whether to stop, and of those that were told so.
        self._stoppable, self._told = set[int](), set[int]()
        self._recorder = OutputRecorder(self._ranks, pool.secrets, self._on_output)
        self._names, shipment, bindings = self._ship(source)
        self._left_out, self._later = shipment.left_out, shipment.later
        calls = {
            rank: RunSource(source, cell_number, waits_for_gpu, bindings=bindings.get(rank))
            for rank in self._ranks
        }
        hear = on_notice or view.notice
        # the ranks read the shipment when the cell's turn comes
        self._execution = Execution(pool, calls, self._recorder, timeout_s, hear, shipment)
        self._expected: dict[str, Composite] = {}
        if notebook is not None and notebook.at_once:
            self._expected = pool.variables.handles.expect(notebook.names, self._names.assigns)

    def done(self) -> bool:
        """Whether every rank has finished."""
        return self._execution.done()

    def interrupt(self) -> None:
        """Interrupt the ranks that still run."""
        self._execution.interrupt()

    @property
    def waits_for(self) -> list[str]:
        """What runs on its ranks and has to end before this begins."""
        return self._execution.waits_for

    @property
    def error(self) -> SpmdError | None:
        """The error, if it has ended with one."""
        return self._execution.error() if self.done() else None

    def result(self, timeout: float | None = None) -> SpmdResult:
        """One value per rank, after waiting. The output is shown when it is asked for first.

        Raises:
            SpmdError: one or more ranks failed.
            StillRunningError: it still runs after `timeout` seconds, and continues.
        """
        __tracebackhide__ = True
        try:
            if timeout is not None and not self._execution.wait(timeout):
                raise StillRunningError(f"{self.name} still runs after {timeout:g} s.")
        except KeyboardInterrupt:  # as without a limit: it means the ranks
            ignore_for_a_moment()
            self._press_stop()
        self.asked = True
        if self._outcome is None:
            self._outcome = self._collect()
            self._view.finish(self._outcome)
        if self._outcome.error is not None:
            # without frames of an earlier time: they would hold what the notebook's cells had
            raise self._outcome.error.with_traceback(None)
        assert self._outcome.result is not None
        return self._outcome.result

    def __await__(self) -> Generator[None, None, SpmdResult]:
        __tracebackhide__ = True
        self.asked = True
        try:
            while not self.done():
                self._tick()
                # Polled: other cells run meanwhile, and the view draws in the thread of the loop.
                yield from asyncio.sleep(0.05).__await__()
        except asyncio.CancelledError:  # by the notebook's stop button, which means the ranks
            self._press_stop()
        return self.result()

    def _on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        for event in content if kind is OutputKind.EVENTS else ():
            if isinstance(event, MonitorEvent):
                asks = event.status == "running" and event.heeds_stop
                (self._stoppable.add if asks else self._stoppable.discard)(event.number)
        self._view.on_output(rank, kind, content)

    def _tick(self) -> None:
        self._view.tick(self._execution.states)
        if self._stop_wish.is_set():
            self._stop_wish.clear()  # else a loop that begins later would end for this press
            self._stop_loops()

    def _press_stop(self) -> None:
        """A loop that asks for it ends gracefully, the rest at once."""
        if not self._stop_loops():
            self.interrupt()

    def _stop_loops(self) -> bool:
        """Have the loops that ask, and were not told, end soon; whether there are any."""
        ready = self._stoppable.copy() - self._told  # a copy: events arrive meanwhile
        if ready:
            self._told |= ready
            self._pool.engines.control(Stop(), self._ranks)
            self._view.notice(_STOPPING)
        return bool(ready)

    def _ship(self, source: str) -> tuple[CellNames, Shipment, Mapping[int, Bindings]]:
        """Bring what the cell reads to the ranks; what goes to each rank with the cell."""
        if self._notebook is None:
            return CellNames(), Shipment(), {}
        # Here and not on a rank: only the notebook's IPython knows its magics and transformers.
        names, variables = names_in_cell(source, self._notebook.transform), self._pool.variables
        shipment = variables.ship(
            names.reads,
            self._notebook.names,
            self._ranks,
            optional=names.binds,
            attributes=names.attributes,
            inside=names.inside,
            # A cell in the background must not hold the notebook until the ranks are free.
            waits=not self._notebook.at_once,
        )
        bound = names.assigns | names.deletes
        return names, shipment, variables.bindings(shipment, self._ranks, bound, names.statements)

    def _collect(self) -> CellReport:
        """Wait, and bind the notebook's names to what the cell has left, also if it failed."""
        __tracebackhide__ = True
        result = error = None
        outputs, number = self._recorder.outputs, self._cell_number
        try:
            replies = self._execution.result(self._tick, self._press_stop)
            result = SpmdResult(replies, outputs, self._execution.elapsed_s, number)
        except SpmdError as raised:
            error = _with_reasons(raised, self._left_out)
        self._recorder.finish()
        if self._notebook is not None:
            self._pool.variables.handles.take_back(
                self._notebook.names,
                self._names.assigns,
                self._names.deletes,
                self._execution.names,
                error is None,
                self._expected,
                self._later,
            )
        return CellReport(outputs, self._execution.elapsed_s, result, error, number)

    def __repr__(self) -> str:
        if not self.done():
            names = ", ".join(self.waits_for)
            return f"SpmdRun(waits for {names})" if names else "SpmdRun(running)"
        return f"SpmdRun(failed: {self.error})" if self.error else "SpmdRun(done)"


def _with_reasons(error: SpmdError, left_out: Mapping[str, str]) -> SpmdError:
    """The error, which says of names that mean nothing on a rank why they were not sent."""
    errors = dict(error.errors)
    for rank, one in errors.items():
        name = _NOT_DEFINED.search(one.evalue) if one.ename == "NameError" else None
        if name and name[1] in left_out:
            hint = f"The notebook's {name[1]} was not sent: {left_out[name[1]]}"
            errors[rank] = replace(one, hint=hint)
    return SpmdError(errors, error.num_ranks) if errors != error.errors else error


def in_its_place(code: str, shell: Any) -> str:
    """The code of a magic, below empty lines: tracebacks number its lines as the notebook does."""
    # IPython stores a cell before it runs it, so the last one is the running one.
    history = getattr(shell.history_manager, "input_hist_raw", None) or [""]
    cell = str(history[-1]).rstrip("\n")
    start = cell.rfind(code.strip("\n"))
    if start < 0:  # run by a program, it is in no history
        return "\n" + code
    return "\n" * cell.count("\n", 0, start) + code.lstrip("\n")
