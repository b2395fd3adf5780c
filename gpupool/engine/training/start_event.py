"""The first event of a training: what will be done. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpupool.core.options.schedule import total_steps
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import StartEvent
from gpupool.data import device as devices
from gpupool.data.datastores.base import Datastore
from gpupool.data.reading.subsets import parts
from gpupool.engine.batches.share import Dataset, num_samples
from gpupool.engine.group.forming import World


def start_event(
    world: World,
    options: TrainingOptions,
    dataset: Dataset,
    steps_per_epoch: int,
    metrics: Sequence[str] | None,
) -> StartEvent:
    """What is about to be done, by resolved options.

    Where the ranks are, the client adds. `steps_per_epoch` is 0 of a stream; `metrics` are the
    names of those asked for, None without a validation.
    """
    validates, every = metrics is not None, options.validate_every
    keeps_best = options.keep == "best" or (options.keep == "auto" and validates)
    every_steps = every if isinstance(every, int) else steps_per_epoch or -1
    # torchvision's data sets are known by name: it need not be installed.
    are_images = all(
        isinstance(part, Datastore)
        or any(cls.__name__ == "VisionDataset" for cls in type(part).__mro__)
        for part in parts(dataset)
    )
    return StartEvent(
        num_epochs=options.epochs,
        steps_per_epoch=steps_per_epoch,
        num_samples=num_samples(dataset),
        batch_size=options.batch_size,
        world_size=world.size,
        device=devices.of(world.device).name,
        backend=world.backend,
        num_steps=total_steps(options, steps_per_epoch) or 0,
        objective=options.objective if validates else "",
        precision=options.precision,
        validate_every=every_steps if validates else 0,
        patience=options.patience or 0,
        keep="best" if keeps_best else "last",
        started_at=time.time(),
        unit="images" if are_images else "samples",
        metrics=tuple(metrics or ()),
    )
