"""In which order the patches of many pairs are taken: pure arithmetic. Runs anywhere; no torch.

A pair of image and mask gives many patches, and is read once for all of them. Patches of one pair
look alike, so a batch must mix pairs; but all pairs at once do not fit into memory. So the batch is
cut into lanes, each of which works off one pair after the other:

    batch        0        1        2        3        4      ...
    lane 0     a a a    a a a    a a e    e e e    e e e            every letter is a pair
    lane 1     b b b    b f f    f f f    f f f    g g g

A rank's share of a batch is contiguous, thus a few whole lanes if the number of ranks divides that
of the lanes: it reads the pairs of its own lanes, and no other rank does. Lanes begin out of step,
so that not all of them need a new pair at the same time; at the end the pairs that are left over
are spread over several lanes.
"""

from __future__ import annotations

import numpy as np

from gpupool.core.errors import OptionsError
from gpupool.data.reading.shards import Indices, keyed_generator, num_batches


def patch_order(
    num_pairs: int, per_image: int, seed: int, epoch: int, batch_size: int, open_pairs: int
) -> Indices:
    """A permutation of all patches: shape (num_pairs * per_image,); patch p of pair i has the index
    `i * per_image + p`.

    A batch mixes `open_pairs` pairs, or as many as it has samples, or as there are. The order
    depends on the arguments alone, not on the number of ranks.

    >>> patch_order(3, 4, seed=0, epoch=0, batch_size=2, open_pairs=2) // 4
    array([1, 1, 2, 1, 2, 1, 2, 0, 2, 0, 0, 0])
    """
    for name, value in (("per_image", per_image), ("open_pairs", open_pairs)):
        if value < 1:
            raise OptionsError(f"{name}={value} must be at least 1")
    total = num_pairs * per_image
    num_full, last = divmod(total, batch_size) if num_batches(total, batch_size) else (0, 0)
    # More lanes than a batch has samples, or than there are pairs, would be empty.
    lanes = min(open_pairs, batch_size, num_pairs)
    if lanes == 0:
        return np.empty(0, np.int64)
    # Where a batch cannot be cut evenly, lanes differ by one sample.
    cuts, last_cuts = (size * np.arange(lanes + 1) // lanes for size in (batch_size, last))
    widths, last_widths = np.diff(cuts), np.diff(last_cuts)
    queues = _queues(num_pairs, per_image, seed, epoch, num_full * widths + last_widths)
    order = np.empty(total, np.int64)
    # A view: what is written to it stands in `order`.
    full = order[: num_full * batch_size].reshape(num_full, batch_size)
    for lane, queue in enumerate(queues):
        ready = num_full * widths[lane]
        full[:, cuts[lane] : cuts[lane + 1]] = queue[:ready].reshape(num_full, widths[lane])
        start = num_full * batch_size
        order[start + last_cuts[lane] : start + last_cuts[lane + 1]] = queue[ready:]
    return order


def _queues(
    num_pairs: int, per_image: int, seed: int, epoch: int, lengths: Indices
) -> list[Indices]:
    """What each lane takes, in order; `lengths` add up to all patches."""
    pairs = keyed_generator(seed, epoch).permutation(num_pairs).astype(np.int64)
    # Heads share the first pairs, whole pairs follow, tails share those that are left over.
    heads = _heads(per_image, lengths)
    whole = (lengths - heads) // per_image
    tails = lengths - heads - whole * per_image
    # The heads of two neighbours add up to a pair.
    num_heads, num_whole = int(heads.sum()) // per_image, int(whole.sum())
    first, middle, left = (
        _patches(part, per_image) for part in np.split(pairs, [num_heads, num_heads + num_whole])
    )
    columns = ((first, heads), (middle, whole * per_image), (left, tails))
    parts = [np.split(patches, np.cumsum(sizes)[:-1]) for patches, sizes in columns]
    return [np.concatenate(lane) for lane in zip(*parts, strict=True)]


def _heads(per_image: int, lengths: Indices) -> Indices:
    """How many patches each lane takes of a first pair that it shares with its neighbour."""
    heads = np.zeros(len(lengths), np.int64)
    num_shared = len(lengths) // 2
    # A lane shorter than a pair has no room for a head.
    if int(lengths.min()) >= per_image:
        # Evenly spread over a pair, so that lanes need their next pair in different batches.
        shares = per_image * (2 * np.arange(num_shared) + 1) // (2 * len(lengths))
        heads[0 : 2 * num_shared : 2] = shares
        heads[1 : 2 * num_shared : 2] = per_image - shares
    return heads


def _patches(pairs: Indices, per_image: int) -> Indices:
    """The indices of all patches of these pairs."""
    return (pairs[:, None] * per_image + np.arange(per_image)).ravel()
