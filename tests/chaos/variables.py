"""What a walk does with variables: assigned, read, changed in place, copied, deleted."""

from __future__ import annotations

from tests.chaos.walk import NUMBERS, Walk
from tests.notebook.kernel import Cell

SHARED = "shared"


def both(walk: Walk, source: str, reads: str = "", assigns: str = "", means: str = "") -> Cell:
    """A cell on all ranks, and in the model, where it `means` the same in other words."""
    walk.doing += f": {source!r}"
    cell = walk.cell(source)
    walk.model.run(means or source, reads, assigns)
    return cell


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


def sync(walk: Walk) -> None:
    """What one rank has, on all of them."""
    chosen = walk.model.holed() or walk.model.whole()
    if chosen:
        name = walk.random.choice(chosen)
        has = [rank for rank, names in enumerate(walk.model.ranks) if name in names]
        if has:
            source = walk.random.choice(has)
            walk.doing += f": {name} of {source}"
            walk.here(f"%gpupool sync {source} {name}")
            walk.model.sync(source, name)
