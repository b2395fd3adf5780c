"""A pool that is this process: rank 0 of 1, for debugging. Runs on the client.

Cells, functions and trainings run in the thread that asks for them, with the engine's own code
(`gpupool/engine/`, which is not imported, but reached through `gpupool/core/wire/invoke.py`):
breakpoints, prompts and post-mortems work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpupool.core.errors import PlacementError, PoolError
from gpupool.core.machine.locks import DeviceLocks, lock_folder, locked_text
from gpupool.core.machine.private_folders import private_temporary
from gpupool.core.machine.topology import Rank
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.wire import invoke
from gpupool.core.wire.calls import Call, RunFunction
from gpupool.core.wire.output import OnMessage, OnOutput
from gpupool.core.wire.pickles import packed
from gpupool.core.wire.replies import CodeReply, Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found, SetEnvironment
from gpupool.pool.calls import presses
from gpupool.pool.calls.execution import Execution
from gpupool.pool.notices import OnNotice, Progress, unheard
from gpupool.pool.pool import Pool
from gpupool.pool.processes.engines import value_of
from gpupool.pool.processes.interface import RankEngines
from gpupool.pool.ranks import Ranks


class InlinePool(Pool):
    """A pool of one rank, which is this process. Made by `gpupool.start(inline=True)`.

    Everything runs in the thread that asks for it and is over when the call returns, also what a
    pool of engines does in the background. In IPython the cells' namespace is the notebook's own:
    rank, world_size, local_rank, device, torch and dist are defined there until `stop`, which also
    leaves the process group and takes RANK, WORLD_SIZE and LOCAL_RANK out of the environment.
    Variables need not be propagated here. What the process shows is not masked: it is the user's.
    """

    def __init__(self, options: PoolOptions, progress: Progress = unheard) -> None:
        super().__init__(replace(options, inline=True, n=1, idle_timeout="never"), progress)
        # its device and cores are known only now
        self._all_ranks.placement = replace(self._all_ranks.placement, ranks=(self._here.rank,))
        if self._here.covered:
            print(
                f"gpupool: what you had as {', '.join(self._here.covered)} is put aside: as in "
                "every cell of a pool, the rank's own is there now. `%gpupool stop` gives yours "
                "back."
            )

    def execute(
        self,
        calls: Mapping[int, Call[Value]],
        on_output: OnOutput,
        timeout_s: float | None = None,
        on_interrupt: Callable[[], None] | None = None,
        on_notice: OnNotice | None = None,
    ) -> Execution[Value]:
        """Call an engine function here and now; what is returned is over."""
        in_main = threading.current_thread() is threading.main_thread()
        if timeout_s is not None and not in_main:
            raise PoolError(
                "timeout_s: an inline pool can end only what its main thread does.", "inline"
            )
        with presses.first_calls(on_interrupt) if on_interrupt else contextlib.nullcontext():
            execution = super().execute(calls, on_output, timeout_s, on_notice=on_notice)
            execution.wait()  # for its thread to take the replies, which are there
            return execution

    def __setitem__(self, name: str, value: object) -> None:
        _own_rank().set(name, value)

    def put(self, value: object) -> Any:
        """The value itself: it is here."""
        return value

    def restart(
        self,
        ranks: str | int | Iterable[int] | None = None,
        *,
        progress: Progress = unheard,
    ) -> None:
        """Raises a PoolError: only the notebook's kernel could be restarted."""
        self._here.restart(self.select_ranks(ranks), self.options.timeout_s, progress)

    def __repr__(self) -> str:
        return f"InlinePool({self.ranks[0].device}, {self.backend}, {self.status().state})"

    def _make_engines(self, ranks: Ranks) -> RankEngines:
        self._here = InlineEngines()
        return self._here

    def _begin_call(
        self,
        call: tuple[Any, ...],
        ranks: Sequence[int],
        on_output: OnOutput,
        timeout_s: float | None,
        on_notice: OnNotice,
    ) -> Execution[CodeReply]:
        """On copies of the arguments, as on an engine."""
        calls = dict.fromkeys(ranks, RunFunction(packed(call)))
        return self.execute(calls, on_output, timeout_s, on_notice=on_notice)


class InlineEngines:
    """The engines of an inline pool: calls run here, one at a time, and are over on return.

    `covered` are the names of the user's that mean something else until `stop`.
    """

    rank: Rank

    def __init__(self) -> None:
        self.covered: tuple[str, ...] = ()
        self.last_used = time.monotonic()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # code that runs here may call again
        self._threads: list[int] = []  # one entry for each call that is not over
        self._numbers: list[int | None] = []  # as above
        self._num_files = 0
        self._locks = DeviceLocks(lock_folder())
        self._folder = private_temporary("gpupool-inline-")

    def lock_gpus(self, uuids: Sequence[str], number: int, force: bool = False) -> list[str]:
        """Lock `number` of these GPUs until `stop`; returns which.

        Raises:
            PlacementError: other pools have them.
        """
        taken, others = self._locks.take(uuids, number, force)
        if len(taken) < number:
            raise PlacementError(locked_text(others, len(uuids), number), "locked")
        return taken

    @property
    def client_file(self) -> Path:
        """There is none: raises a PoolError."""
        raise PoolError(
            "an inline pool is this process, and has no engines to connect to.", "inline"
        )

    def of_others(self, ranks: Iterable[int]) -> list[int]:
        """None: only this process asks."""
        return []

    def start(self, ranks: Sequence[Rank], timeout_s: float, progress: Progress) -> None:
        """Make this process rank 0 of 1.

        Raises:
            PoolError: it has a process group already, which is left alone.
            PlacementError: torch does not see the GPU.
        """
        progress("this process becomes rank 0 of 1")
        (self.rank,) = ranks
        self.rank, covered = _own_rank().join(self.rank, self._folder)
        self.covered = tuple(covered)

    @property
    def pids(self) -> dict[int, int]:
        """This process."""
        return {0: self._pid}

    def alive_ranks(self) -> list[int]:
        """Rank 0."""
        return [0]

    def busy_ranks(self) -> list[int]:
        """Rank 0 while a call runs."""
        return [0] if self._threads else []

    def running(self) -> list[tuple[int, int | None]]:
        """(0, number) of the call that is not over, of several the outermost."""
        return [(0, number) for number in self._numbers[:1]]

    def call(
        self, rank: int, call: Call[Value], on_message: OnMessage | None = None
    ) -> Future[Reply[Value]]:
        """Make a call, in this thread; the future is done."""
        future: Future[Reply[Value]] = Future()
        with self._lock:
            depth = len(self._threads)
            try:
                self._numbers.append(call.number)
                self._threads.append(threading.get_ident())  # an interrupt may come from here on
                future.set_result(_own_rank().call(call, on_message))
            except BaseException as error:  # an interrupt that met our own frames, say
                future.set_exception(error)
            finally:
                del self._threads[depth:], self._numbers[depth:]
                self.last_used = time.monotonic()
        return future

    def restart(self, ranks: Sequence[int], timeout_s: float, progress: Progress) -> None:
        """Raises a PoolError: only the notebook's kernel could be restarted."""
        raise PoolError(
            "an inline pool is this process: restart the notebook's kernel instead.", "inline"
        )

    def call_all(
        self, call: Call[Value], ranks: Iterable[int] | None = None, timeout_s: float = 60.0
    ) -> dict[int, Value]:
        """Make a call; nothing it says is taken note of."""
        return {0: value_of(0, _own_rank().call(call, None))}

    def interrupt(self, numbers: Mapping[int, int | None]) -> None:
        """Interrupt what runs here, if another thread asks for it and the main thread does it."""
        if numbers.get(0) not in (None, *self._numbers):
            return
        main = threading.main_thread().ident
        if main is not None and main in self._threads and main != threading.get_ident():
            signal.pthread_kill(main, signal.SIGINT)

    def kill(self, rank: int, reason: str) -> None:
        """Nothing: this process is the user's."""

    def control(
        self, request: ControlRequest[Found], ranks: Iterable[int] | None = None
    ) -> dict[int, Future[Answer[Found]]]:
        """Do what a control request asks for; from any thread.

        Variables are here already; open file systems take new credentials.
        """
        wanted: ControlRequest[Any] = request
        if isinstance(request, SetEnvironment):
            wanted = replace(request, variables={}, unset=[])
        answered: Future[Answer[Found]] = Future()
        answered.set_result(_own_rank().control(wanted))
        return {0: answered}

    def new_file(self, name: str) -> Path:
        """A new path in the private folder."""
        self._num_files += 1
        return self._folder / f"{self._num_files}-{name}"

    def log(self, rank: int) -> str:
        """There is no log; says where the output is."""
        return (
            "Rank 0 is this process (an inline pool): it has no log of its own, and what it prints "
            "outside of cells is where you see everything else this process prints."
        )

    def stop(self) -> None:
        """Make this process what it was, and remove the folder."""
        if os.getpid() != self._pid:  # a fork of the process that ends
            return
        _own_rank().leave()
        self._locks.release()
        shutil.rmtree(self._folder, ignore_errors=True)


def _own_rank() -> invoke.OwnRank:
    """This process as a rank; the engine's code is loaded for it."""
    importlib.import_module("gpupool.engine.entry").serve_calls()
    assert invoke.own_rank is not None
    return invoke.own_rank
