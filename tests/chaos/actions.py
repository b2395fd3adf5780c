"""What a walk does: variables assigned, read and changed; cells that fail; deaths and restarts."""

from __future__ import annotations

from tests.chaos.model import Either
from tests.chaos.walk import NUMBERS, WORLD_SIZE, Walk, at

SHARED = "shared"
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


def both(walk: Walk, source: str, reads: str = "", assigns: str = "") -> None:
    """A cell on all ranks, and in the model."""
    walk.doing += f": {source!r}"
    walk.here(f"%%spmd\n{source}")
    walk.model.run(source, reads, assigns)


def assign(walk: Walk) -> None:
    name, value = walk.random.choice(NUMBERS), walk.value()
    both(walk, f"{name} = {value} + rank", assigns=name)


def assign_here(walk: Walk) -> None:
    source = f"{walk.random.choice(NUMBERS)} = {walk.value()}"
    walk.doing += f": {source}"
    walk.here(source)
    walk.model.run_here(source, source[0])


def read(walk: Walk) -> None:
    """One name from another, the notebook's or the ranks'."""
    readable = [n for n in NUMBERS if n in walk.model.notebook or n in walk.model.whole()]
    if readable:
        source, name = walk.random.choice(readable), walk.random.choice(NUMBERS)
        both(walk, f"{name} = {source} + 1000 * rank", source, name)


def change_here(walk: Walk) -> None:
    """A list of the notebook's, changed in place, is sent again."""
    source = f"{SHARED}.append({walk.value()})"
    if SHARED not in walk.model.notebook:
        source = f"{SHARED} = [{walk.value()}]"
    walk.here(source)
    walk.model.run_here(source, SHARED * ("=" in source))
    both(walk, f"a = list({SHARED})[-1] + len({SHARED})", SHARED, "a")


# ---- cells that fail, or are stopped


def raise_on_one(walk: Walk) -> None:
    """The others have changed something, and wait."""
    name, value = walk.random.choice(NUMBERS), walk.value()
    rank = walk.random.randrange(WORLD_SIZE)
    walk.doing += f": rank {rank}, {name}"
    walk.fails(
        f"if rank != {rank}: {name} = {value}\ndist.barrier()\n"
        f"if rank == {rank}: raise ValueError('planted')\ndist.barrier()",
        f"rank {rank}: ValueError: planted",
    )
    others = [r for r in range(WORLD_SIZE) if r != rank]
    walk.model.run(f"{name} = {value}", assigns=name, ranks=others)


def stop(walk: Walk) -> None:
    """Once, twice or five times, at any moment."""
    wait, after_s = walk.random.choice(WAITS), walk.moment()
    times = walk.random.choice((1, 1, 2, 5))
    walk.doing += f": {wait!r} after {after_s}, {times} times"
    whole, value = [n for n in walk.model.whole() if n in NUMBERS], walk.value()
    name = walk.random.choice(whole) if whole else "_x"
    walk.stopped(f"{name} = {value}\n{wait}", after_s, times)
    if whole:
        for have in walk.model.ranks:
            have[name] = Either((have[name], value))


# ---- deaths


def kill_idle(walk: Walk) -> None:
    ranks = walk.some_ranks()
    walk.doing += f": {ranks}"
    walk.kill(ranks)
    walk.lose(*ranks)


def kill_busy(walk: Walk) -> None:
    ranks, wait, after_s = walk.some_ranks(), walk.random.choice(WAITS), walk.moment()
    walk.doing += f": {ranks} after {after_s}, others {wait!r}"
    kill = at(after_s, lambda: walk.kill(ranks))
    walk.fails(wait, "killed by SIGKILL", meanwhile=[kill])
    walk.lose(*ranks)


def restart(walk: Walk) -> None:
    ranks = walk.some_ranks()
    walk.doing += f": {ranks}"
    walk.here(f"%gpupool restart {','.join(map(str, ranks))}")
    walk.lose(*ranks)
