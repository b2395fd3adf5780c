"""A share cut into the parts in which it is computed. Runs on engines; knows only torch."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gpupool.engine.batches import Share
from gpupool.engine.trees import map_tensors


class Part(NamedTuple):
    """Some samples of a share; `num_here` 0: a stand-in that counts nothing."""

    inputs: Any
    targets: Any
    num_here: int


def parts_of(share: Share, number: int, *, keep_empty: bool) -> list[Part]:
    """The share in `number` parts, in order: those of the global batch, or of nearly equal size.

    Parts without samples are left out, unless `keep_empty`, where every rank must compute as many;
    a stand-in takes their place then. There is always one part.
    """
    if number == 1 or (share.num_here == 0 and not keep_empty):
        return [Part(share.inputs, share.targets, share.num_here)]
    cuts = [share.num_here * i // number for i in range(number + 1)]
    if len(share.part_sizes) == number and sum(share.part_sizes) == share.num_here:  # none skipped
        cuts = [0, *accumulate(share.part_sizes)]
    pieces = [cut for cut in pairwise(cuts) if cut[0] < cut[1] or keep_empty]
    return [_cut(share, *cut) if cut[0] < cut[1] else _stand_in(share) for cut in pieces]


def _cut(share: Share, start: int, stop: int) -> Part:
    inputs = map_tensors(lambda tensor: tensor[start:stop], share.inputs)
    targets = map_tensors(lambda tensor: tensor[start:stop], share.targets)
    return Part(inputs, targets, stop - start)


def _stand_in(share: Share) -> Part:
    return _cut(share, 0, 1)._replace(num_here=0)
