"""What a walk does against the pool: cells that fail or are stopped, deaths, restarts."""

from __future__ import annotations

import signal

from tests.chaos.model import Either
from tests.chaos.walk import NUMBERS, Walk, at
from tests.support.processes import gone, until

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


def crash(walk: Walk) -> None:
    rank, how = walk.random.randrange(walk.world_size), walk.random.choice(CRASHES)
    walk.doing += f": {how} on {rank}"
    walk.fails(f"import os\nif rank == {rank}: {how}\ndist.barrier()", "its variables are lost")
    walk.lose(rank)


def kill_what_all_need(walk: Walk) -> None:
    member = walk.random.choice(("starter", "controller"))
    is_busy, wait = walk.random.random() < 0.5, walk.random.choice(WAITS)
    walk.doing += f": {member}, {'in ' + repr(wait) if is_busy else 'idle'}"
    if is_busy:
        kill = at(walk.moment(), lambda: walk.signal(signal.SIGKILL, member))
        walk.fails(wait, member, meanwhile=[kill])
    else:
        ranks = [walk.pid(f"rank {rank}") for rank in range(walk.world_size)]
        walk.signal(signal.SIGKILL, member)
        if member == "starter":  # the kernel frees its memory first: until then the ranks work
            until(lambda: gone(*ranks), 5.0, "the end of the ranks")


def restart(walk: Walk) -> None:
    ranks = walk.some_ranks()
    walk.doing += f": {ranks}"
    walk.here(f"%gpupool restart {','.join(map(str, ranks))}")
    walk.lose(*ranks)
