"""Ranks that are gone are replaced without being asked. Runs on the client, in the background.

A replacement has its turn like a cell, before all that wait: what runs on the other ranks ends
first, and nothing begins until the group is whole again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpupool.pool.upkeep.turns import Turn, Turns


class Recovery:
    """Calls `replace()`, which replaces all lost ranks, whenever one is reported as lost."""

    def __init__(self, turns: Turns, replace: Callable[[], None]) -> None:
        self._turns = turns
        self._replace = replace
        self._lock = threading.Lock()
        self._is_wanted = self._works = False
        self._turn: Turn | None = None
        self._rests = threading.Event()
        self._rests.set()

    def begin(self, rank: int, world_size: int) -> None:
        """Have this rank replaced; returns at once."""
        with self._lock:
            self._is_wanted = True
            if self._works:
                return  # the thread that works looks again before it ends
            self._works = True
            self._rests.clear()
        name = f"the replacement of rank {rank}"
        self._turn = turn = self._turns.ask(range(world_size), name, first=True)

        def work() -> None:
            try:
                while self._turns.begin(turn):
                    time.sleep(0.01)
                while self._goes_on():
                    self._replace()
            except Exception:  # whoever waits would wait for ever
                logging.getLogger("gpupool").exception("lost ranks were not replaced")
                with self._lock:
                    self._works = False
            finally:
                self._turns.end(turn)
                with self._lock:
                    if not self._works:  # nothing else has begun meanwhile
                        self._rests.set()

        threading.Thread(target=work, name="gpupool-recovery", daemon=True).start()

    @property
    def waits_for(self) -> list[str]:
        """What runs on the other ranks and ends before a replacement begins."""
        return self._turns.ahead(self._turn) if self._turn is not None else []

    def wait(self) -> None:
        """Wait until nothing is being replaced."""
        while not self._rests.wait(0.1):  # in slices, to hear an interrupt on every platform
            pass

    def _goes_on(self) -> bool:
        with self._lock:
            self._works, self._is_wanted = self._is_wanted, False
            return self._works
