"""What a fault on one of three ranks costs: time to the error, to the next all-reduce, and state.

    python benchmarks/faults.py [--reps 10] [--peer-reps 3] [--limit 5]

In every cell the other ranks are in an all-reduce, which cannot end. Seconds are from the fault
(the line that raises or crashes, the signal, the press of Stop) to the error in the notebook, and
to the right result of the next all-reduce of all three ranks; median, and the worst in brackets.
"Kept" are the ranks whose variables of earlier cells are still there.

Beside it plain ipyparallel, with a group formed by hand; both take turns. A wait there ends after
the limit: "does not return". As this leaves its engines blocked it gets a new cluster each time.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpupool

RANKS = 3
BLOCKED_S = 0.4  # after which all are where they are to be when the fault comes
SUM = "t = torch.ones(1); dist.all_reduce(t); total = t.item()"
NOW = (
    "import pathlib, time; time.sleep({wait}); pathlib.Path({path!r}).write_text(str(time.time()))"
)
MISMATCH = """
if rank == 0: dist.all_reduce(torch.ones(1))
elif rank == 1: dist.broadcast(torch.ones(1), 0); dist.barrier()
else: dist.barrier()
dist.all_reduce(torch.ones(4))
"""
FORM = """
import os, signal, time, torch
import torch.distributed as dist
rank = {rank}
dist.init_process_group("gloo", store=dist.FileStore({path!r}, {n}), rank=rank, world_size={n})
dist.all_reduce(torch.ones(1))
"""


@dataclass(frozen=True)
class Fault:
    """What rank 1 does in the cell; `signal` is sent to it, SIGINT means Stop."""

    does: str
    signal: int = 0

    def cell(self, path: Path) -> str:
        """The source; it leaves the time of the fault in `path`, if that comes from within."""
        now = NOW.format(wait=BLOCKED_S, path=str(path))
        if self.does == MISMATCH:
            return MISMATCH
        body = [*([] if self.signal else [now]), *self.does.splitlines()]
        inner = "\n".join(f"    {line}" for line in body)
        return f"if rank == 1:\n{inner}\ndist.all_reduce(torch.ones(1))"


FAULTS = {
    "raise": Fault("raise ValueError('one')"),
    "Stop, one rank asleep": Fault("import time; time.sleep(600)", signal.SIGINT),
    "Stop, mismatched collectives": Fault(MISMATCH, signal.SIGINT),
    "kill -9": Fault("import time; time.sleep(600)", signal.SIGKILL),
    "SIGTERM while it computes": Fault("while True: pass", signal.SIGTERM),
    "quit()": Fault("quit()"),
    "segfault": Fault("import ctypes; ctypes.string_at(0)"),
}


@dataclass
class Seen:
    """What was measured of one fault; None stands for what did not come within the limit."""

    error_s: list[float | None] = field(default_factory=list)
    sum_s: list[float | None] = field(default_factory=list)
    kept: list[tuple[int, ...]] = field(default_factory=list)


class Gpupool:
    """A pool that stays over all faults."""

    def __init__(self) -> None:
        self.pool = gpupool.start(n=RANKS, device="cpu")

    def set_variable(self, value: int) -> None:
        self.pool.run(f"kept = {value} + rank")

    def meet(self, fault: Fault, path: Path) -> tuple[float, float | None]:
        """(when the fault was, when its error was there)."""
        execution = self.pool.begin(fault.cell(path), ranks=range(RANKS), on_output=lambda *_: None)
        if fault.signal:
            time.sleep(BLOCKED_S)
        began = time.time()
        if fault.signal == signal.SIGINT:
            execution.interrupt()
        elif fault.signal:
            os.kill(self.pool.status().pids[1], fault.signal)
        try:
            execution.result()
        except gpupool.SpmdError:
            ended = time.time()
        return (began if fault.signal else float(path.read_text())), ended

    def sum(self) -> float:
        """When the next all-reduce was right."""
        assert set(self.pool.run(f"{SUM}; total").values()) == {float(RANKS)}
        return time.time()

    def kept(self, value: int) -> tuple[int, ...]:
        """The ranks that have their variable still."""
        found = self.pool.run("globals().get('kept')")
        return tuple(rank for rank, now in found.items() if now == value + rank)

    def close(self) -> None:
        self.pool.stop()


class Plain:
    """An ipyparallel cluster that has formed a group; a new one for each fault."""

    def __init__(self, limit_s: float) -> None:
        import ipyparallel
        from traitlets.config import Config

        self.limit_s = limit_s
        settings = {"Cluster": {"delay": 0.0}, "LocalEngineSetLauncher": {"delay": 0.0}}
        self.cluster = ipyparallel.Cluster(n=RANKS, config=Config(settings), log_level=50)
        self.client: Any = self.cluster.start_and_connect_sync(activate=False)
        self.client.wait_for_engines(RANKS, timeout=120, interactive=False)
        self.pids = self.client[:].apply_sync(os.getpid)
        with tempfile.TemporaryDirectory() as folder:
            sources = [
                FORM.format(path=f"{folder}/store", n=RANKS, rank=rank) for rank in range(RANKS)
            ]
            for result in [self.client[rank].execute(s) for rank, s in enumerate(sources)]:
                result.get(60)

    def set_variable(self, value: int) -> None:
        self.client[:].execute(f"kept = {value} + rank", block=True)

    def meet(self, fault: Fault, path: Path) -> tuple[float, float | None]:
        """(when the fault was, when its error was there or None)."""
        running = self.client[:].execute(fault.cell(path), block=False)
        time.sleep(BLOCKED_S if fault.signal else 2 * BLOCKED_S)
        began = time.time() if fault.signal else float(path.read_text())
        if fault.signal == signal.SIGINT:
            self.client.send_signal(signal.SIGINT, block=False)
        elif fault.signal:
            os.kill(self.pids[1], fault.signal)
        return began, self._ended(running)

    def sum(self) -> float | None:
        """When the next all-reduce was right, with the group as it was left."""
        if len(self.client.ids) < RANKS:
            return None
        running = self.client[:].apply_async(_sum_here)
        ended = self._ended(running)
        return ended if ended and running.successful() else None

    def kept(self, value: int) -> tuple[int, ...]:
        """The ranks that answer, and have their variable still."""
        asked = {rank: self.client[rank].apply_async(_kept_here) for rank in self.client.ids}
        time.sleep(1.0)
        answers = {r: a.get() for r, a in asked.items() if a.ready() and a.successful()}
        return tuple(rank for rank, now in answers.items() if now == value + rank)

    def close(self) -> None:
        self.cluster.stop_cluster_sync()
        for pid in self.pids:  # blocked engines outlive it
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _ended(self, running: Any) -> float | None:
        running.wait(self.limit_s)
        return time.time() if running.ready() else None


def _sum_here() -> float:
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def _kept_here() -> object:
    from IPython.core.getipython import get_ipython

    return get_ipython().user_ns.get("kept")  # type: ignore[union-attr]


def meet(subject: Gpupool | Plain, fault: Fault, number: int, seen: Seen) -> None:
    """Have a fault on rank 1, and note what it costs."""
    subject.set_variable(100 * number)
    with tempfile.TemporaryDirectory() as folder:
        began, ended = subject.meet(fault, Path(folder) / "at")
    summed = subject.sum() if ended else None
    seen.error_s.append(ended and ended - began)
    seen.sum_s.append(summed and summed - began)
    seen.kept.append(subject.kept(100 * number))


def run(reps: int, peer_reps: int, limit_s: float) -> dict[str, tuple[Seen, Seen]]:
    """Fault -> what was seen of gpupool and of ipyparallel, which take turns."""
    found = {name: (Seen(), Seen()) for name in FAULTS}
    pool = Gpupool()
    try:
        for number in range(reps):
            for name, fault in FAULTS.items():
                meet(pool, fault, number, found[name][0])
                if number < peer_reps:
                    with closing(Plain(limit_s)) as plain:
                        meet(plain, fault, number, found[name][1])
    finally:
        pool.close()
    return found


def seconds(times: list[float | None], missing: str) -> str:
    """Median and worst; `missing` if it did not come each time."""
    came = [time for time in times if time is not None]
    if not came:
        return missing
    text = f"{statistics.median(came):.2f} ({max(came):.2f})"
    return text if len(came) == len(times) else f"{text}, {len(times) - len(came)} x {missing}"


def ranks_kept(kept: list[tuple[int, ...]]) -> str:
    """What every repetition has kept."""
    always = sorted(set(range(RANKS)).intersection(*kept))
    return f"rank {', '.join(map(str, always))}" if always else "nothing"


def table(found: dict[str, tuple[Seen, Seen]], limit_s: float) -> str:
    """All of it, as Markdown."""
    lines = [
        "| fault on rank 1 | gpupool: error, s | next all_reduce, s | kept "
        "| ipyparallel: error, s | next all_reduce | answers and kept |",
        "|---" * 7 + "|",
    ]
    late = f"does not return ({limit_s:g} s)"
    for name, (ours, theirs) in found.items():
        cells = [seconds(ours.error_s, late), seconds(ours.sum_s, "never"), ranks_kept(ours.kept)]
        if theirs.kept:
            cells += [seconds(theirs.error_s, late), seconds(theirs.sum_s, "never")]
            cells.append(ranks_kept(theirs.kept))
        else:
            cells += ["-"] * 3
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Meet all faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--peer-reps", type=int, default=3, help="of ipyparallel, slow; 0: none")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds until it is given up")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = run(chosen.reps, chosen.peer_reps, chosen.limit)
    print(f"\n{RANKS} CPU ranks; gpupool {chosen.reps}, ipyparallel {chosen.peer_reps} repetitions")
    print(f"\n{table(found, chosen.limit)}", flush=True)


if __name__ == "__main__":
    main()
