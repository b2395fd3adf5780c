"""What a walk does with variables: assigned, read, changed in place, copied, deleted."""

from __future__ import annotations

from tests.chaos.walk import NUMBERS, Walk
from tests.notebook.kernel import Cell

LISTS, SHARED = ("p", "q"), "shared"


def both(walk: Walk, source: str, reads: str = "", assigns: str = "", means: str = "") -> Cell:
    """A cell on all ranks, and in the model, where it `means` the same in other words."""
    walk.doing += f": {source!r}"
    cell = walk.cell(source)
    walk.model.run(means or source, reads, assigns)
    return cell


def assign(walk: Walk) -> None:
    name, value = walk.random.choice(NUMBERS), walk.value()
    both(walk, f"{name} = {value} + rank", assigns=name)


def assign_on_some(walk: Walk) -> None:
    name, value, ranks = walk.random.choice(NUMBERS), walk.value(), walk.some_ranks()
    source = f"{name} = {value} + rank"
    walk.doing += f": {source} on {ranks}"
    walk.cell(source, f"-t {','.join(map(str, ranks))}")
    walk.model.run(source, assigns=name, ranks=ranks)


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


def call(walk: Walk) -> None:
    """A function of the notebook's, which reads a global name."""
    readable = [n for n in NUMBERS if n in walk.model.notebook or n in walk.model.whole()]
    if readable:
        source, name = walk.random.choice(readable), walk.random.choice(NUMBERS)
        walk.here(f"def _double(x):\n    return 2 * x + {source}")
        both(walk, f"{name} = _double(rank)", source, name, f"{name} = 2 * rank + {source}")


def delete(walk: Walk) -> None:
    for name in set(NUMBERS) & set(walk.model.whole()):
        walk.doing += f": {name}"
        walk.cell(f"del {name}")
        walk.model.delete(name)
        break


def change_here(walk: Walk) -> None:
    """A list of the notebook's, changed in place, is sent again."""
    source = f"{SHARED}.append({walk.value()})"
    if SHARED not in walk.model.notebook:
        source = f"{SHARED} = [{walk.value()}]"
    walk.here(source)
    walk.model.run_here(source, SHARED * ("=" in source))
    both(walk, f"a = list({SHARED})[-1] + len({SHARED})", SHARED, "a")


def change_there(walk: Walk) -> None:
    """The ranks' copies of it, each changed for itself: they stay so until it is sent again."""
    if SHARED in walk.model.notebook:
        both(walk, f"{SHARED}.append({walk.value()} + rank)", SHARED)
        both(walk, f"b = sum({SHARED})", SHARED, "b")


def change_own(walk: Walk) -> None:
    """A list of each rank's own, also by another name."""
    name = walk.random.choice(LISTS)
    if name not in walk.model.whole():
        both(walk, f"{name} = [rank]", assigns=name)
    both(walk, f"_same = {name}\n_same.append({walk.value()})", name)


def take_large(walk: Walk) -> None:
    """An array of some megabytes, changed in place."""
    value = walk.value()
    walk.doing += f": {value}"
    walk.here(
        "import numpy\nif '_large' not in globals(): _large = numpy.zeros(2_000_000)\n"
        f"_large[-1] = {value}"
    )
    walk.cell("c = int(_large.sum()) + rank")
    walk.model.run(f"c = {value} + rank", assigns="c")


def use_import(walk: Walk) -> None:
    """What a cell has imported is there on a new rank too."""
    if not walk.references.get("imports"):
        walk.references["imports"] = True
        walk.cell("import fractions\nfrom fractions import Fraction as Share")
    value, name = walk.value(), walk.random.choice(NUMBERS)
    source = f"{name} = int(Share({value}) + fractions.Fraction(rank))"
    both(walk, source, assigns=name, means=f"{name} = {value} + rank")


def sync(walk: Walk) -> None:
    """What one rank has, on all of them."""
    chosen = walk.model.holed() or [(name, 0) for name in walk.model.whole()]
    if chosen:
        name, rank = walk.random.choice(chosen)
        has = [r for r, names in enumerate(walk.model.ranks) if name in names]
        if has:
            source = walk.random.choice(has)
            walk.doing += f": {name} of {source}, lost on {rank}"
            walk.here(f"%gpupool sync {source} {name}")
            walk.model.sync(source, name)


def read_what_is_lost(walk: Walk) -> None:
    if holed := walk.model.holed():
        name, rank = walk.random.choice(holed)
        walk.doing += f": {name} on {rank}"
        walk.fails(f"_x = {name}", "NameError", f"{name} was lost with rank ")
