"""`gpupool.Metrics`: exact metrics over the ranks, for loops of one's own. Runs on engines.

metrics = gpupool.Metrics(["accuracy", "f1"])
with torch.no_grad():
    for batch in gpupool.shard_batches(held_out, 256, shuffle=False):
        metrics.update(model(batch.inputs), batch)
metrics.compute()        # {'accuracy': 0.93, 'f1': 0.91}, on every rank
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gpupool.engine.batches.share import Share
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.own_loop.sharding import world_of


class Metrics:
    """Metrics that are those of one process with all samples, whatever share each rank has.

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
