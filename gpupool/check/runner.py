"""Runs checks one after the other, each within its time, and ends whatever happens.

A check runs in a thread of its own, so that the main thread always hears Ctrl-C and the clock. A
check that is late has failed: the stacks of all threads go to stderr, its pool is stopped, which
ends what it waits for, and the next check has another pool. If the pool cannot be stopped either,
the rest is left out, and the process has to end without its threads.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from gpupool.check.bench import Bench
from gpupool.check.promise import Check, Found, Line, NotKeptError, NotTriedError, Verdict
from gpupool.core.errors import GpuPoolError

STOP_S = 60.0  # for a pool whose ranks hang in the driver
_OURS = str(Path(__file__).parent)
_MAX_CHARS = 300  # of an error in a line


class Runner:
    """Runs checks at a bench.

    Args:
        begin_within_s: a check that would begin later than that is skipped, but for the last ones.
        on_line: hears of each line as it is there.
    """

    def __init__(
        self,
        bench: Bench,
        begin_within_s: float,
        on_line: Callable[[Line], None],
    ) -> None:
        self.lines: list[Line] = []
        self.is_stuck = False
        """Whether a thread was left behind that cannot be ended."""
        self._bench = bench
        self._working = _begun(lambda: None)  # the thread of the check
        self._on_line = on_line
        self._deadline = time.monotonic() + begin_within_s

    def run(
        self, first: Check[Bench], checks: Sequence[Check[Bench]], last: Sequence[Check[Bench]]
    ) -> None:
        """Run `first`, without which nothing can be checked, then `checks`, then `last`."""
        is_up = self._add(first).verdict != "FAIL"
        for one in checks:
            why = "no time left" if time.monotonic() > self._deadline else ""
            self._add(one, "there is no pool" if not is_up else why)
        for one in last:
            self._add(one)

    def close(self) -> None:
        """Stop the pool and wait for the check that works with it, for no longer than `STOP_S`."""
        deadline = time.monotonic() + STOP_S
        closing = _begun(self._bench.close)
        # Both: a check that still worked could start another pool while this process ends.
        for thread in (closing, self._working):
            thread.join(max(0.0, deadline - time.monotonic()))
            self.is_stuck |= thread.is_alive()

    def _add(self, one: Check[Bench], why_not: str = "") -> Line:
        why_not = "a pool before could not be stopped" if self.is_stuck else why_not
        began = time.monotonic()
        verdict: Verdict = "skip"
        found = Found(why_not)
        if not why_not:
            verdict, found = self._tried(one)
        seconds = time.monotonic() - began
        line = Line(one.name, one.promise, verdict, found.text, seconds, found.figures)
        self.lines.append(line)
        self._on_line(line)
        return line

    def _tried(self, one: Check[Bench]) -> tuple[Verdict, Found]:
        outcome: list[tuple[Verdict, Found]] = []
        bench = self._bench
        self._working = _begun(lambda: outcome.append(_outcome(one, bench)))
        self._working.join(one.limit_s)
        if not self._working.is_alive():
            verdict, found = outcome[0]
        else:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            verdict = "FAIL"
            found = Found(f"not done after {one.limit_s:g} s; all stacks are on stderr")
        if verdict == "FAIL":  # what it has left must not be the next one's
            self.close()
            self._bench = self._bench.another()
        return verdict, found


def _begun(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="gpupool-check", daemon=True)
    thread.start()
    return thread


def _outcome(one: Check[Bench], bench: Bench) -> tuple[Verdict, Found]:
    try:
        found = one.run(bench)
    except NotTriedError as reason:
        return "skip", Found(str(reason))
    except NotKeptError as reason:
        return "FAIL", Found(str(reason))
    except GpuPoolError as error:
        return "FAIL", Found(f"{type(error).__name__}: {error}".split("\n")[0][:_MAX_CHARS])
    except BaseException as error:  # also what ends threads: whoever waits has to hear of it
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename.startswith(_OURS)] or list(frames)
        place = f"{Path(ours[-1].filename).name}, line {ours[-1].lineno}"
        return "FAIL", Found(f"{type(error).__name__} at {place}: {error}"[:_MAX_CHARS])
    return ("note" if found.is_note else "ok"), found
