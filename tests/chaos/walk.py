"""A walk: random things done to a notebook with a pool, one after the other, from a seed.

What is done, and when, follows from the seed and the number of the action alone. What the machine
makes of that is what is tried out.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.invariants import LOOK, Notebook, names_mean_what_they_must
from tests.chaos.model import Model
from tests.notebook.kernel import Cell, Kernel, Step
from tests.support.raising import frames_of_ours

ROOT = Path(__file__).parents[2]
SUM = "%%spmd\n_ones = torch.ones(1); dist.all_reduce(_ones); print('sum', _ones.item())"
WORKS_S = 15.0  # after whatever was done
SLOW = 4  # times slower may a machine be that others use too
NUMBERS = ("a", "b", "c", "d")  # names that actions use
ADVICE = re.compile(r"`(%gpupool [^`]*)`")
GOES_ON = ("is being replaced", "next run tries again")  # run it again


class Walk:
    """A notebook and its model. `doing` says what is done, `done` what was; `random` is for it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.done, self.doing = seed, list[str](), ""
        self.random = random.Random(seed)
        self.model = Model(0)
        self.number = 0  # of the action
        self._ranks: dict[int, int] = {}  # rank -> pid, after the action before
        self._lost: set[int] = set()  # since then
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        self.folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="walk-")))
        self.kernel = self._ends.enter_context(
            Kernel(PYTHONPATH=str(ROOT), TMPDIR=str(self.folder))
        )
        self.notebook = Notebook(self.kernel, self.folder)
        self.here(f"%load_ext gpupool\nimport gpupool{LOOK}")
        self.start(3)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._ends.close()

    # ---- cells ----------------------------------------------------------------------------

    def here(self, source: str) -> Cell:
        """A cell of the notebook's own, which ends well."""
        return self._well(self.kernel.run(source, timeout_s=100.0), source)

    def cell(self, source: str) -> Cell:
        """A cell on the ranks, which ends well."""
        return self._well(self.kernel.run(f"%%spmd\n{source}"), source)

    def fails(
        self,
        source: str,
        *words: str,
        presses: Sequence[float] = (),
        meanwhile: Sequence[Step] = (),
    ) -> str:
        """The message of a cell on the ranks, which ends with an error that has these words."""
        cell = self.kernel.run(
            f"%%spmd\n{source}",
            interrupt_after_s=presses,
            meanwhile=meanwhile,
            timeout_s=SLOW * WORKS_S,
        )
        assert cell.status == "error", f"no error from {source!r}, but {cell.text[-500:]!r}"
        text = self._clean(cell)
        for word in words:
            assert word in text, f"{word!r} is not in {text!r}"
        return text

    def stopped(self, source: str, after_s: float, times: int) -> None:
        """A cell on the ranks in which stop is pressed so many times.

        If the kernel has not begun with it then, as may be with any cell, it is pressed again.
        """

        def press() -> None:
            for _ in range(times):
                self.kernel.press_stop()
                time.sleep(0.2)

        self.fails(source, "KeyboardInterrupt", meanwhile=[at(after_s, press)], presses=(25.0,))

    def _well(self, cell: Cell, source: str) -> Cell:
        assert cell.status == "ok", f"{source!r}: {self._clean(cell)}"
        return cell

    def _clean(self, cell: Cell) -> str:
        """The message of a failed cell: one, and nothing of ours in it."""
        text = cell.error_text
        assert not frames_of_ours(text), text
        assert "ipyparallel" not in text, text
        return text

    # ---- the pool -------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.model.ranks)

    def start(self, world_size: int) -> None:
        """Start a pool."""
        self.here(f"%gpupool start --cpu -n {world_size}")
        self.model.start(world_size)
        self._ranks = {}

    def lose(self, *ranks: int) -> None:
        """These ranks are lost, and replaced before the next thing is done."""
        self.model.lose(ranks)
        self._lost |= set(ranks)

    def pid(self, member: str) -> int:
        """The process of a member of the pool."""
        return self.notebook.members()[member].pid

    def signal(self, number: int, *members: str) -> None:
        """Send a signal to members of the pool: "rank 1", "starter"."""
        for pid in [self.pid(member) for member in members]:
            os.kill(pid, number)

    # ---- by chance ------------------------------------------------------------------------

    def value(self) -> int:
        """A number that was not there before, but for a chance of one in a million."""
        return self.random.randrange(10**6)

    def some_ranks(self) -> list[int]:
        """One rank, two, or all."""
        count = self.random.choice((1, 1, 1, 2, self.world_size))
        return sorted(self.random.sample(range(self.world_size), count))

    def moment(self) -> float:
        """Seconds until something strikes."""
        return self.random.choice((0.1, 0.2, 0.4, 0.8))

    # ---- what has to hold -----------------------------------------------------------------

    def works(self) -> None:
        """The next all_reduce is right, at once or when the advice of what is said is followed."""
        cell = self.kernel.run(SUM, timeout_s=SLOW * WORKS_S)
        for _ in range(3):
            if cell.status == "ok":
                break
            self._follow(self._clean(cell))
            cell = self.kernel.run(SUM, timeout_s=SLOW * WORKS_S)
        assert cell.status == "ok", f"advice did not help: {self._clean(cell)}"
        assert f"sum {float(self.world_size)}" in cell.text, cell.text

    def _follow(self, text: str) -> None:
        """Do what a message says, to the letter."""
        advised = ADVICE.findall(text)
        self.done.append(f"    followed {advised} of: {text[:200]}")
        if "%gpupool start" in advised:
            self.here("%gpupool stop")
            self.start(self.world_size)
            return
        assert advised or any(words in text for words in GOES_ON), f"no way on is told: {text}"
        for command in advised:
            self.here(command)

    def only_these_are_new(self) -> None:
        """No rank has another process, but those that were meant to be lost."""
        pids = {name: process.pid for name, process in self.notebook.members().items()}
        ranks = {rank: pids[f"rank {rank}"] for rank in range(self.world_size)}
        new = {rank for rank, pid in ranks.items() if pid != self._ranks.get(rank, pid)}
        assert new <= self._lost, f"ranks {new} were replaced, {self._lost} were to be"
        self._ranks, self._lost = ranks, set()

    def check(self) -> None:
        """Everything."""
        self.works()
        self.only_these_are_new()
        names_mean_what_they_must(self.kernel, self.model)
        self.notebook.only_the_pool(self.world_size)

    # ---- one after the other --------------------------------------------------------------

    def step(self, actions: Sequence[Callable[[Walk], None]], weights: Iterable[float]) -> None:
        """Do one thing, and see whether all is as it must be.

        Raises:
            AssertionError: it is not; says what was done, and how it is done again.
        """
        self.number += 1
        self.random = random.Random(f"{self.seed} {self.number}")
        (action,) = self.random.choices(actions, list(weights))
        self.doing = action.__name__
        began = time.monotonic()
        try:
            action(self)
            self.check()
        except Exception as error:
            lines = "\n".join(self.done)
            raise AssertionError(
                f"action {self.number} of seed {self.seed}: {self.doing}: {error}\n"
                f"replay: python -m tests.chaos.test_walk {self.seed} {self.number}\n{lines}"
            ) from error
        self.done.append(f"{self.number:4} {time.monotonic() - began:5.1f} s {self.doing}")

    def end(self) -> None:
        """The notebook's end takes all along."""
        if self.random.random() < 0.5:
            self.notebook.process.kill()
        else:
            self.kernel.client.shutdown()
        self.notebook.nothing_is_left()


def at(seconds: float, do: Callable[[], object]) -> Step:
    """Something done that long after the kernel has begun with a cell."""

    def is_due(cell: Cell) -> bool:
        begun = [when for when, kind, _ in cell.messages if kind == "execute_input"]
        due.extend(time.monotonic() + seconds for _ in begun if not due)
        return bool(due) and time.monotonic() > due[0]

    due: list[float] = []
    return is_due, do
