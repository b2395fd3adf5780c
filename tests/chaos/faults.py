"""What a walk does against the pool: cells that fail or are stopped, deaths, restarts."""

from __future__ import annotations

import contextlib
import signal
import textwrap
import threading

from tests.chaos.model import Either
from tests.chaos.walk import NUMBERS, Walk, at
from tests.support.processes import gone, until

WAITS = (  # what ranks do when they are stopped; each would never end
    "while True: pass",
    "import time; time.sleep(600)",
    "dist.all_reduce(torch.ones(1))\nif rank == 0:\n    import time; time.sleep(600)\n"
    "dist.all_reduce(torch.ones(1))",
    "dist.barrier() if rank else dist.all_reduce(torch.ones(3))\nimport time; time.sleep(600)",
    "if rank: dist.all_gather_object([None] * world_size, rank)\nelse:\n    while True: pass",
    "import time\nwhile True:\n    try: time.sleep(0.05)\n    except Exception: pass",
    "import subprocess; subprocess.run(['sleep', '600'])",
    "import socket; _ends = socket.socketpair(); _ends[0].recv(1)",
    "import threading; threading.Event().wait()",
    "import queue; queue.Queue().get()",
    "while True: print('x' * 100)",
    "while True: torch.ones(300, 300) @ torch.ones(300, 300)",
)
CRASHES = ("os._exit(7)", "os.abort()", "import ctypes; ctypes.string_at(0)")


# ---- cells that fail, or are stopped


def raise_on_one(walk: Walk) -> None:
    """The others have changed something, and wait."""
    name, value = walk.random.choice(NUMBERS), walk.value()
    rank = walk.random.randrange(walk.world_size)
    walk.doing += f": rank {rank}, {name}"
    walk.fails(
        f"if rank != {rank}: {name} = {value}\ndist.barrier()\n"
        f"if rank == {rank}: raise ValueError('planted')\ndist.barrier()",
        f"rank {rank}: ValueError: planted",
    )
    others = [r for r in range(walk.world_size) if r != rank]
    walk.model.run(f"{name} = {value}", assigns=name, ranks=others)


def raise_on_all(walk: Walk) -> None:
    name, value = walk.random.choice(NUMBERS), walk.value()
    walk.fails(f"{name} = {value} + rank\n1 / 0", "ZeroDivisionError")
    walk.model.run(f"{name} = {value} + rank", assigns=name)


def stop(walk: Walk) -> None:
    """Once, twice or five times, at any moment."""
    wait, after_s, times = (
        walk.random.choice(WAITS),
        walk.moment(),
        walk.random.choice((1, 1, 2, 5)),
    )
    walk.doing += f": {wait!r} after {after_s}, {times} times"
    whole, value = [n for n in walk.model.whole() if n in NUMBERS], walk.value()
    name = walk.random.choice(whole) if whole else "_x"
    walk.stopped(f"{name} = {value}\n{wait}", after_s, times)
    if whole:
        for _rank, have in enumerate(walk.model.ranks):
            have[name] = Either((have[name], value))


def stop_idle(walk: Walk) -> None:
    walk.kernel.press_stop()


def exceed_time(walk: Walk) -> None:
    wait = walk.random.choice(WAITS)
    walk.doing += f": {wait!r}"
    source = f"if rank:\n{textwrap.indent(wait, '    ')}"
    walk.fails(source, "took longer than 0.3 s", options="--timeout 0.3")


def run_in_background(walk: Walk) -> None:
    name, value = walk.random.choice(NUMBERS), walk.value()
    walk.doing += f": {name}"
    source = f"{name} = {value} + rank"
    walk.cell(f"import time; time.sleep({walk.moment()})\n{source}", "--nowait")
    walk.model.run(source, assigns=name)


def leave_on_one(walk: Walk) -> None:
    """A rank that leaves the cell frees the others."""
    rank, how = (
        walk.random.randrange(walk.world_size),
        walk.random.choice(("quit()", "exit()", "import sys; sys.exit(0)")),
    )
    walk.doing += f": {how} on {rank}"
    walk.fails(f"if rank == {rank}: {how}\ndist.barrier()", "has left the cell")


# ---- deaths


def kill_idle(walk: Walk) -> None:
    ranks = walk.some_ranks()
    walk.doing += f": {ranks}"
    walk.signal(signal.SIGKILL, *(f"rank {rank}" for rank in ranks))
    walk.lose(*ranks)


def kill_busy(walk: Walk) -> None:
    ranks, wait, after_s = walk.some_ranks(), walk.random.choice(WAITS), walk.moment()
    walk.doing += f": {ranks} after {after_s}, others {wait!r}"
    kill = at(after_s, lambda: walk.signal(signal.SIGKILL, *(f"rank {r}" for r in ranks)))
    walk.fails(wait, "killed by SIGKILL", meanwhile=[kill])
    walk.lose(*ranks)


def terminate(walk: Walk) -> None:
    """As a scheduler does, in a cell or not."""
    rank = walk.random.randrange(walk.world_size)
    wait = walk.random.choice((None, *WAITS))
    walk.doing += f": rank {rank}, {wait!r}"
    if wait is None:
        pid = walk.pid(f"rank {rank}")
        walk.signal(signal.SIGTERM, f"rank {rank}")
        until(lambda: gone(pid), 2.0, "the end of the rank")
    else:
        end = at(walk.moment(), lambda: walk.signal(signal.SIGTERM, f"rank {rank}"))
        walk.fails(wait, "SIGTERM", meanwhile=[end])
    walk.lose(rank)


def crash(walk: Walk) -> None:
    rank, how = walk.random.randrange(walk.world_size), walk.random.choice(CRASHES)
    walk.doing += f": {how} on {rank}"
    walk.fails(f"import os\nif rank == {rank}: {how}\ndist.barrier()", "its variables are lost")
    walk.lose(rank)


def pause(walk: Walk) -> None:
    """A process of the pool stands still for a while."""
    members = ("starter", "controller", *(f"rank {rank}" for rank in range(walk.world_size)))
    member, seconds = walk.random.choice(members), walk.random.choice((0.5, 2.0))
    walk.doing += f": {member} for {seconds}"
    walk.signal(signal.SIGSTOP, member)
    go_on = threading.Timer(seconds, walk.signal, (signal.SIGCONT, member))
    go_on.start()
    walk.cell("dist.barrier()")
    go_on.join()


def freeze(walk: Walk) -> None:
    """A rank stands still for ever: Stop names it, and replaces it."""
    rank = walk.random.randrange(walk.world_size)
    walk.doing += f": rank {rank}"
    walk.signal(signal.SIGSTOP, f"rank {rank}")
    walk.fails("dist.barrier()", f"rank {rank} did not react", presses=(0.5, 5.0))
    walk.lose(rank)


def kill_what_all_need(walk: Walk) -> None:
    member = walk.random.choice(("starter", "controller"))
    is_busy, wait = walk.random.random() < 0.5, walk.random.choice(WAITS)
    walk.doing += f": {member}, {'in ' + repr(wait) if is_busy else 'idle'}"
    if is_busy:
        kill = at(walk.moment(), lambda: walk.signal(signal.SIGKILL, member))
        walk.fails(wait, member, meanwhile=[kill])
    else:
        walk.signal(signal.SIGKILL, member)


def restart(walk: Walk) -> None:
    ranks = walk.some_ranks()
    walk.doing += f": {ranks}"
    walk.here(f"%gpupool restart {','.join(map(str, ranks))}")
    walk.lose(*ranks)


def kill_in_restart(walk: Walk) -> None:
    """Of a rank."""
    ranks, after_s = walk.some_ranks(), walk.random.choice((0.02, 0.1, 0.3))
    member = f"rank {walk.random.randrange(walk.world_size)}"
    walk.doing += f": {member} after {after_s} of {ranks}"

    def kill() -> None:
        with contextlib.suppress(KeyError, ProcessLookupError):  # it is just being replaced
            walk.signal(signal.SIGKILL, member)
            killed.append(member)

    killed: list[str] = []
    command = f"%gpupool restart {','.join(map(str, ranks))}"
    cell = walk.kernel.run(
        f"{command}\nimport time; time.sleep(0.5)", meanwhile=[at(after_s, kill)]
    )
    assert cell.status == "ok", cell.errors
    walk.lose(*ranks, *(int(name.removeprefix("rank ")) for name in killed))


def new_pool(walk: Walk) -> None:
    """Of another size."""
    size = walk.random.choice((2, 3))
    walk.doing += f" of {size}"
    walk.here("%gpupool stop")
    walk.start(size)
