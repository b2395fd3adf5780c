"""A walk: random things done to a notebook with a pool, one after the other, from a seed.

What is done, and when, follows from the seed and the number of the action alone. What the machine
makes of that is what is tried out. After every action `check` sees what holds, as a user and the
machine's `ps` see it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil

from tests.chaos.model import Either, Model, No
from tests.notebook.kernel import Cell, Kernel, Step
from tests.support.processes import gone, until
from tests.support.raising import frames_of_ours

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 3
SUM = "%%spmd\n_ones = torch.ones(1); dist.all_reduce(_ones); print('sum', _ones.item())"
WORKS_S = 60.0  # after whatever was done, on a machine that others use too
NUMBERS = ("a", "b", "c", "d")  # names that actions use
ADVICE = re.compile(r"`(%gpupool restart [^`]*)`")
GOES_ON = ("is being replaced", "next run tries again")  # run it again
LOOK = """
def _look(names):
    import json
    from gpupool.pool import session
    def of(handle, rank):
        try:
            return ["value", handle[rank]]
        except gpupool.GpuPoolError as error:
            return ["error", str(error)]
    found = {}
    for name in names:
        value = globals().get(name)
        if type(value).__name__ == "Composite":
            found[name] = [of(value, rank) for rank in range(len(value))]
        else:
            found[name] = value
    print(json.dumps([found, list(session.current_pool().status().pids.values())]))
"""


class Walk:
    """A notebook and its model. `doing` says what is done, `done` what was; `random` is for it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.done, self.doing = seed, list[str](), ""
        self.random = random.Random(seed)
        self.model = Model(WORLD_SIZE)
        self._pids: list[int] = []  # of the ranks, after the action before
        self._lost: set[int] = set()  # since then
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        self._folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="walk-")))
        kernel = Kernel(PYTHONPATH=str(ROOT), TMPDIR=str(self._folder))
        self.kernel = self._ends.enter_context(kernel)
        self.here(f"%load_ext gpupool\nimport gpupool{LOOK}")
        self.here(f"%gpupool start --cpu -n {WORLD_SIZE}")
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    # ---- cells ----------------------------------------------------------------------------

    def here(self, source: str) -> str:
        """What a cell shows that ends well."""
        cell = self.kernel.run(source)
        assert cell.status == "ok", f"{source!r}: {self._clean(cell)}"
        return cell.text

    def fails(
        self,
        source: str,
        *words: str,
        presses: Sequence[float] = (),
        meanwhile: Sequence[Step] = (),
    ) -> None:
        """A cell on the ranks, which ends with an error that has these words."""
        cell = self.kernel.run(
            f"%%spmd\n{source}",
            interrupt_after_s=presses,
            meanwhile=meanwhile,
            timeout_s=WORKS_S,
        )
        assert cell.status == "error", f"no error from {source!r}, but {cell.text[-500:]!r}"
        text = self._clean(cell)
        for word in words:
            assert word in text, f"{word!r} is not in {text!r}"

    def stopped(self, source: str, after_s: float, times: int) -> None:
        """A cell on the ranks in which stop is pressed so many times.

        If the kernel has not begun with it then, as may be with any cell, it is pressed again.
        """

        def press() -> None:
            for _ in range(times):
                self.kernel.press_stop()
                time.sleep(0.2)

        self.fails(source, "KeyboardInterrupt", meanwhile=[at(after_s, press)], presses=(25.0,))

    def _clean(self, cell: Cell) -> str:
        """The message of a failed cell: one, and nothing of ours in it."""
        text = cell.error_text
        assert not frames_of_ours(text), text
        assert "ipyparallel" not in text, text
        return text

    def lose(self, *ranks: int) -> None:
        """These ranks are lost, and replaced before the next thing is done."""
        self.model.lose(ranks)
        self._lost |= set(ranks)

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill ranks."""
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGKILL)

    def _everyone(self) -> list[int]:
        """Every process of it on this machine, whoever is its parent; the kernel too."""
        mark, found = f"TMPDIR={self._folder}\0".encode(), []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes() and not gone(pid):
                    found.append(pid)
        return found

    # ---- by chance ------------------------------------------------------------------------

    def value(self) -> int:
        """A number that was not there before, but for a chance of one in a million."""
        return self.random.randrange(10**6)

    def some_ranks(self) -> list[int]:
        """One rank, two, or all."""
        count = self.random.choice((1, 1, 1, 2, WORLD_SIZE))
        return sorted(self.random.sample(range(WORLD_SIZE), count))

    def moment(self) -> float:
        """Seconds until something strikes."""
        return self.random.choice((0.1, 0.2, 0.4, 0.8))

    # ---- what has to hold -----------------------------------------------------------------

    def check(self) -> None:
        """The next all_reduce is right, names mean what they must, and nobody is new but who is
        to be."""
        for _ in range(3):
            cell = self.kernel.run(SUM, timeout_s=WORKS_S)
            if cell.status == "ok":
                break
            text = self._clean(cell)
            advised = ADVICE.findall(text)
            assert advised or any(words in text for words in GOES_ON), f"no way on is told: {text}"
            for command in advised:
                self.here(command)
        assert f"sum {float(WORLD_SIZE)}" in cell.text, cell.text
        found, pids = json.loads(self.here(f"_look({self.model.names})"))
        self._names_mean_what_they_must(found)
        new = {rank for rank, pid in enumerate(pids) if self._pids and pid != self._pids[rank]}
        assert new <= self._lost, f"ranks {new} were replaced, {self._lost} were to be"
        self._pids, self._lost = pids, set()
        # the kernel, the starter, the controller, the ranks, and nobody else
        until(lambda: len(self._everyone()) == 3 + WORLD_SIZE, 5.0, "only the pool's processes")

    def _names_mean_what_they_must(self, found: dict[str, Any]) -> None:
        """Each name of the notebook is a value or a handle, and what it says is the model's.

        What was not certain is so from now on.
        """
        model = self.model
        assert {n: found[n] for n in model.notebook} == model.notebook
        for name in sorted(model.handles):
            assert isinstance(found[name], list), f"{name} is {found[name]!r}, not a handle"
            for rank in range(WORLD_SIZE):
                _agree(model, name, rank, *found[name][rank])

    # ---- one after the other --------------------------------------------------------------

    def step(self, actions: Sequence[Callable[[Walk], None]], weights: Iterable[float]) -> None:
        """Do one thing, and see whether all is as it must be.

        Raises:
            AssertionError: it is not; says what was done, and how it is done again.
        """
        number = len(self.done) + 1
        self.random = random.Random(f"{self.seed} {number}")
        (action,) = self.random.choices(actions, list(weights))
        self.doing = action.__name__
        try:
            action(self)
            self.check()
        except Exception as error:
            lines = "\n".join(self.done)
            raise AssertionError(
                f"action {number} of seed {self.seed}: {self.doing}: {error}\n"
                f"replay: python -m tests.chaos.test_walk {self.seed} {number}\n{lines}"
            ) from error
        self.done.append(f"{number:4} {self.doing}")

    def end(self) -> None:
        """The notebook's end takes all along."""
        if self.random.random() < 0.5:
            provisioner: Any = self.kernel.manager.provisioner
            os.kill(provisioner.pid, signal.SIGKILL)
        else:
            self.kernel.client.shutdown()
        until(lambda: not self._everyone(), 3.0, "the end of all processes")
        files = self._folder.rglob
        until(lambda: not any(p.is_file() for p in files("gpupool-*/**/*")), 3.0, "no files")


def _agree(model: Model, name: str, rank: int, kind: str, found: Any) -> None:
    expected = model.value(name, rank)
    said = f"{name}[{rank}]: {found!r}, expected {expected}"
    if isinstance(expected, No):
        assert kind == "error", said
        lost = rf"was lost with .*\brank {rank}, which "  # said too where it may have had one
        assert re.search(lost, found) or ("no variable" in found and expected is No.NEVER), said
        return
    assert kind == "value", said
    possible = expected.values if isinstance(expected, Either) else (expected,)
    assert found in possible, said
    model.ranks[rank][name] = expected if not isinstance(expected, Either) else found


def at(seconds: float, do: Callable[[], object]) -> Step:
    """Something done that long after the kernel has begun with a cell."""

    def is_due(cell: Cell) -> bool:
        begun = [when for when, kind, _ in cell.messages if kind == "execute_input"]
        due.extend(time.monotonic() + seconds for _ in begun if not due)
        return bool(due) and time.monotonic() > due[0]

    due: list[float] = []
    return is_due, do
