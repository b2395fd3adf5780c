"""What `train()` is made of, for loops of one's own. Runs on engines, and under plain torchrun.

    parallel = DistributedDataParallel(model)
    for epoch in range(1, 11):
        for batch in gpupool.shard_batches(dataset, 128, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(parallel(batch.inputs), batch.targets)
            optimizer.zero_grad()
            gpupool.weighted_loss(loss, batch).backward()
            optimizer.step()

Every sample comes once an epoch, on one rank, and the gradients are those of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import with_data
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data import device as devices
from gpupool.data.reading.shards import num_batches
from gpupool.engine.batches.shares import Dataset, Share, epoch_shares, num_samples
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.numerics.batch_norm import counting
from gpupool.engine.process import this_rank


def world_of(group: dist.ProcessGroup | None, device: torch.device | None = None) -> World:
    """This process among those of a group (None: all), on the device of this rank unless given."""
    if device is None and "GPUPOOL_RANK" in os.environ:
        device = torch.device(this_rank().device)
    elif device is None:
        place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if devices.has_gpu() else "cpu"
        device = torch.device(place)
    if not dist.is_initialized():
        return World(0, 1, device)
    return World(dist.get_rank(group), dist.get_world_size(group), device, group)


@dataclass(frozen=True, slots=True)
class ShardedBatches:
    """Made by `shard_batches`. `len()` counts the global batches: as many on every rank."""

    dataset: Dataset
    options: TrainingOptions
    epoch: int
    samples_done: int
    world: World

    def __len__(self) -> int:
        num = num_samples(self.dataset)
        if not num:
            raise TypeError("nobody knows how many batches there are: the stream has no len()")
        return num_batches(num - self.samples_done, self.options.batch_size)

    def __iter__(self) -> Iterator[Share]:
        shares = epoch_shares(self.dataset, self.options, self.world, self.epoch, self.samples_done)
        for share in shares:
            with counting(share.num_here > 0):  # in batch norms over all ranks
                yield share


def shard_batches(
    dataset: Dataset,
    batch_size: int = 128,
    *,
    epoch: int = 1,
    seed: int = 0,
    shuffle: Literal["every-epoch", "once", "never"] | bool = "every-epoch",
    samples_done: int = 0,
    weights: Any = None,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> ShardedBatches:
    """This rank's share of each global batch of an epoch, on its device, read ahead.

    They are the batches of `train()`, which has the same `batch_size` (over all ranks), `seed`,
    `shuffle` (True means "every-epoch", False "never") and `weights`. Each has `inputs`, `targets`,
    `num_here` (how many samples they are) and `num_all` (of the whole batch). A rank whose share is
    empty has one sample with `num_here` 0, as every rank has to take every step; `weighted_loss`
    gives it no weight, and batch norms of `sync_batch_norm` leave it out.

    Args:
        dataset: one with an index, or an `IterableDataset` that gives every rank the same samples.
        epoch: counts from 1; with the seed it says in which order the samples come.
        samples_done: how many samples of the epoch are left out, as they were trained on before.
        device: where the batches are put; this rank's device unless given.
        group: the ranks that share the batches; all unless given.

    Raises:
        OptionsError: a number that makes no sense.
    """
    words: dict[Any, Any] = {True: "every-epoch", False: "never"}
    order = words.get(shuffle, shuffle)
    # Through the options of `train()`, so that both have the same batches and the same checks.
    options = TrainingOptions(batch_size=batch_size, seed=seed, shuffle=order, weights=weights)
    options = with_data(options, dataset)
    if epoch < 1:
        raise OptionsError(f"epoch={epoch}: epochs are counted from 1.")
    return ShardedBatches(dataset, options, epoch, samples_done, world_of(group, device))


def weighted_loss(
    mean_loss: Tensor, batch: Share, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """What to call `backward()` on, so that DDP's average is the mean over the whole global batch.

    DDP averages the gradients over the ranks, however many samples each has: the mean loss of a
    rank counts (samples here) * (ranks) / (samples of the batch).

    Args:
        mean_loss: the mean over this rank's samples; of a rank without samples it counts nothing.
        group: the ranks that DDP averages over; all unless given.
    """
    world = world_of(group, mean_loss.device)
    # 0 times NaN is NaN, and the placeholder of an empty share may give any loss
    mean_loss = mean_loss if batch.num_here else torch.nan_to_num(mean_loss, 0.0, 0.0, 0.0)
    return mean_loss * (batch.num_here * world.size / batch.num_all)


class Metrics:
    """Metrics that are those of one process with all samples, whatever share each rank has.

        for batch in gpupool.shard_batches(held_out, 256, shuffle=False):
            metrics.update(model(batch.inputs), batch)
        metrics.compute()        # {'accuracy': 0.93, 'f1': 0.91}, on every rank

    Args:
        metrics: as for `gpupool.evaluate`.
        group: the ranks whose samples are put together; all unless given.

    Raises:
        TrainingError: an unknown name, or two metrics of the same one.
    """

    def __init__(self, metrics: Any, *, group: dist.ProcessGroup | None = None) -> None:
        self._world = world_of(group)
        self._metrics = make_metrics(metrics)

    def update(self, outputs: Any, batch: Share) -> None:
        """Add what the network gave for a batch of `shard_batches`."""
        if batch.num_here:  # a placeholder's network still has to run: batch norms may wait for it
            self._metrics.update(outputs, batch.targets)

    def compute(self) -> dict[str, float]:
        """The values over what all ranks have seen; every rank has to call this.

        Raises:
            TrainingError: on every rank, if one cannot be computed.
        """
        return self._metrics.compute(self._world)

    def reset(self) -> None:
        """Forget everything: a pass over the data begins."""
        self._metrics.reset()
