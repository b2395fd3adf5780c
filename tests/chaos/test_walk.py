"""Random things are done to a notebook, and what is promised holds after each.

    python -m tests.chaos.test_walk SEED [NUM_ACTIONS]

does a piece again, and prints each action. What is done, and when, follows from the seed and the
number of the action alone. What the machine makes of that is what is tried out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.notebook.kernel import Cell, Kernel, Step
from tests.support.processes import gone, until
from tests.support.raising import frames_of_ours

ROOT = Path(__file__).parents[2]
RANKS = range(3)
NAMES = "abcd"
WORKS_S = 60.0  # after whatever was done, on a machine that others use too
LOOK = f"""%%spmd
import json, os
_ones = torch.ones(1); dist.all_reduce(_ones)
print("seen", json.dumps([rank, os.getpid(), _ones.item(),
                          {{name: globals().get(name) for name in {NAMES!r}}}]))
"""
ADVICE = re.compile(r"`(%gpupool restart [^`]*)`")
GOES_ON = ("is being replaced", "next run tries again")  # run it again
WAITS = (  # what ranks do when they are stopped; each would never end
    "while True: pass",
    "dist.all_reduce(torch.ones(1))\nif rank == 0:\n    import time; time.sleep(600)\n"
    "dist.all_reduce(torch.ones(1))",
    "dist.barrier() if rank else dist.all_reduce(torch.ones(3))\nimport time; time.sleep(600)",
    "import time\nwhile True:\n    try: time.sleep(0.05)\n    except Exception: pass",
    "import subprocess; subprocess.run(['sleep', '600'])",
    "import threading; threading.Event().wait()",
    "while True: print('x' * 100)",
)


def after(seconds: float, do: Callable[[], object]) -> Step:
    """Something done that long after the kernel has begun with a cell."""

    def is_due(cell: Cell) -> bool:
        begun = [when for when, kind, _ in cell.messages if kind == "execute_input"]
        due.extend(time.monotonic() + seconds for _ in begun if not due)
        return bool(due) and time.monotonic() > due[0]

    due: list[float] = []
    return is_due, do


class Walk:
    """A notebook with a pool, and what each rank may have by each name."""

    def __init__(self, kernel: Kernel, folder: Path, seed: int) -> None:
        self.kernel, self.folder, self.seed = kernel, folder, seed
        self.done: list[str] = []
        self.have: list[dict[str, set[int]]] = [{} for _ in RANKS]
        self.pids: list[int] = []
        self.lost: set[int] = set()  # since the last look
        self.here(f"%load_ext gpupool\n%gpupool start --cpu -n {len(RANKS)}")
        self.check()

    # ---- cells, and what is by chance

    def here(self, source: str) -> None:
        """A cell that ends well."""
        cell = self.kernel.run(source)
        assert cell.status == "ok", f"{source!r}: {self.clean(cell)}"

    def fails(self, source: str, word: str, *meanwhile: Step) -> None:
        """A cell on the ranks, which ends with an error that has this word."""
        cell = self.kernel.run(f"%%spmd\n{source}", meanwhile=meanwhile, timeout_s=WORKS_S)
        assert cell.status == "error", f"no error from {source!r}, but {cell.text[-500:]!r}"
        assert word in self.clean(cell)

    def clean(self, cell: Cell) -> str:
        """The message of a failed cell: one, and nothing of ours in it."""
        text = cell.error_text
        assert not frames_of_ours(text), text
        assert "ipyparallel" not in text, text
        return text

    def some_ranks(self) -> list[int]:
        """One rank, two, or all; they are lost, and replaced before the next thing is done."""
        count = self.random.choice((1, 1, 1, 2, len(RANKS)))
        ranks = sorted(self.random.sample(RANKS, count))
        for rank in ranks:
            self.have[rank] = {}
        self.lost |= set(ranks)
        return ranks

    def new(self) -> tuple[str, int]:
        """A name, and a number that was not there before."""
        return self.random.choice(NAMES), self.random.randrange(10**6)

    def moment(self) -> float:
        return self.random.choice((0.2, 0.4, 0.8))

    # ---- actions

    def assign(self) -> None:
        name, value = self.new()
        self.here(f"%%spmd\n{name} = {value} + rank")
        for rank, have in enumerate(self.have):
            have[name] = {value + rank}

    def copy(self) -> None:
        """One name from another, where all ranks have that."""
        whole = [name for name in NAMES if all(name in have for have in self.have)]
        if whole:
            source, (name, _) = self.random.choice(whole), self.new()
            self.here(f"%%spmd\n{name} = {source} + 1000 * rank")
            for rank, have in enumerate(self.have):
                have[name] = {value + 1000 * rank for value in have[source]}

    def raise_on_one(self) -> None:
        """The others have changed something, and wait."""
        (name, value), failing = self.new(), self.random.choice(RANKS)
        self.fails(
            f"if rank != {failing}: {name} = {value}\ndist.barrier()\n"
            f"if rank == {failing}: raise ValueError('planted')\ndist.barrier()",
            f"rank {failing}: ValueError: planted",
        )
        for rank in set(RANKS) - {failing}:
            self.have[rank][name] = {value}

    def stop(self) -> None:
        """Once, twice or five times, at any moment."""
        (name, value), times = self.new(), self.random.choice((1, 1, 2, 5))

        def press() -> None:
            for _ in range(times):
                self.kernel.press_stop()
                time.sleep(0.2)

        source = f"{name} = {value}\n{self.random.choice(WAITS)}"
        self.fails(source, "KeyboardInterrupt", after(self.moment(), press))
        for have in self.have:  # it came before the assignment or after it
            have[name] = have.get(name, {-1}) | {value}

    def kill(self) -> None:
        """While they are idle, or in the middle of a cell."""
        pids = [self.pids[rank] for rank in self.some_ranks()]
        strike = lambda: [os.kill(pid, signal.SIGKILL) for pid in pids]  # noqa: E731
        if self.random.random() < 0.5:
            strike()
        else:
            wait = self.random.choice(WAITS)
            self.fails(wait, "killed by SIGKILL", after(self.moment(), strike))

    def restart(self) -> None:
        self.here(f"%gpupool restart {','.join(map(str, self.some_ranks()))}")

    # ---- what has to hold

    def step(self) -> str:
        """Do one thing, and see whether all is as it must be; raises AssertionError if not."""
        number = len(self.done) + 1
        self.random = random.Random(f"{self.seed} {number}")
        actions = (self.assign, self.copy, self.raise_on_one, self.stop, self.kill, self.restart)
        (action,) = self.random.choices(actions, (5, 4, 4, 6, 8, 3))
        self.done.append(f"{number:4} {action.__name__}")
        try:
            action()
            self.check()
        except Exception as error:
            replay = f"python -m tests.chaos.test_walk {self.seed} {number}"
            raise AssertionError("\n".join([f"{error}", *self.done, replay])) from error
        return self.done[-1]

    def check(self) -> None:
        """An all_reduce is right, ranks have what they must, nobody is new but who is to be."""
        for _ in range(3):
            cell = self.kernel.run(LOOK, timeout_s=WORKS_S)
            if cell.status == "ok":
                break
            text = self.clean(cell)
            advised = ADVICE.findall(text)
            assert advised or any(words in text for words in GOES_ON), f"no way on: {text}"
            for command in advised:
                self.here(command)
        seen = sorted(map(json.loads, re.findall(r"(?m)\] seen (.*)$", cell.text)))
        assert [(rank, total) for rank, _, total, _ in seen] == [(r, len(RANKS)) for r in RANKS]
        pids = [pid for _, pid, _, _ in seen]
        new = {rank for rank in RANKS if self.pids and pids[rank] != self.pids[rank]}
        assert new <= self.lost, f"ranks {new} were replaced, {self.lost} were to be"
        for rank, _, _, found in seen:
            for name in NAMES:
                value = -1 if found[name] is None else found[name]
                assert value in self.have[rank].get(name, {-1}), f"{name} of rank {rank}: {value}"
                self.have[rank].pop(name, None)
                self.have[rank] |= {} if value == -1 else {name: {value}}
        self.pids, self.lost = pids, set()
        # the kernel, the starter, the controller, the ranks, and nobody else
        until(lambda: len(self.everyone()) == 3 + len(RANKS), 5.0, "only the pool's processes")

    def everyone(self) -> list[int]:
        """Every process of it on this machine, whoever is its parent; the kernel too."""
        mark, found = f"TMPDIR={self.folder}\0".encode(), []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes() and not gone(pid):
                    found.append(pid)
        return found

    def end(self) -> None:
        """The notebook's end takes all along."""
        provisioner: Any = self.kernel.manager.provisioner
        os.kill(provisioner.pid, signal.SIGKILL)
        until(lambda: not self.everyone(), 3.0, "the end of all processes")
        files = self.folder.rglob
        until(lambda: not any(p.is_file() for p in files("gpupool-*/**/*")), 3.0, "no files")


def walk(seed: int, num_actions: int, loud: bool = False) -> None:
    """Walk so many actions; raises AssertionError at the first one that breaks something."""
    with (
        tempfile.TemporaryDirectory(prefix="walk-") as folder,
        Kernel(PYTHONPATH=str(ROOT), TMPDIR=folder) as kernel,
    ):
        one = Walk(kernel, Path(folder), seed)
        for _ in range(num_actions):
            done = one.step()
            if loud:
                print(done, flush=True)
        one.end()


@pytest.mark.long
@pytest.mark.timeout(0)  # each cell has its limit
@pytest.mark.parametrize("seed", range(1, 6))
def test_nothing_that_happens_in_any_order_costs_more_than_it_must(seed: int) -> None:
    walk(seed, 50)


if __name__ == "__main__":
    walk(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50, loud=True)
