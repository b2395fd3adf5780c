"""Run a network over a data set on the ranks that train. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupool.core.jobs import InferenceJob
from gpupool.core.progress import progress
from gpupool.core.wire.calls import Predict
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.training.call import ask, inference_options

if TYPE_CHECKING:
    from torch import nn


def predict(
    model: nn.Module,
    dataset: Any,
    *,
    batch_size: int = 256,
    precision: str = "float32",
    pool: Pool | None = None,
    **reading: Any,
) -> Any:
    """The outputs of `model` for every sample, in order, on the CPU.

    Each rank computes a part. Only the inputs of the data set's samples are used; the network is in
    evaluation mode and is called with them, be they a tensor, a dict or a list.

    Args:
        batch_size: samples per step over all ranks.
        precision: "float32", or "bf16" or "fp16" by `torch.autocast`; outputs are float32 then.
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: options of `TrainingOptions` that say how samples are read.

    Returns:
        A tensor of shape (len(dataset), ...): for a classifier (samples, classes). Of a network
        with several outputs a dict or list of such; a named tuple becomes a dict.

    Raises:
        TrainingError: the input is not a network or not a data set.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    import torch

    # Before `ask`, which would do the same: the outputs need a place in the pool's folder.
    pool = current_pool(create=True) if pool is None else pool
    result_path = pool.new_file("outputs.pt")
    options = inference_options("predict", batch_size=batch_size, precision=precision, **reading)
    job = InferenceJob(model, dataset, options)
    # Through files: the controller would copy outputs several times, and hold them in memory.
    num = len(ask("predict", pool, job, partial(Predict, result_path=str(result_path))))
    paths = [result_path.with_name(f"{result_path.name}.{i}") for i in range(num)]
    parts = []
    with progress("Reading the outputs", len(paths), "ranks") as bar:
        for path in paths:
            # `_plain` on the ranks has left tensors, dicts and lists: no code has to run.
            parts.append(torch.load(path, weights_only=True))
            bar.advance()
    _remove(paths)
    # Each rank has a share of every batch.
    batches = chain.from_iterable(zip(*parts, strict=True))
    return _together([batch for batch in batches if batch is not None])


def _together(batches: list[Any]) -> Any:
    """One tensor of those of the batches; likewise in dicts and lists."""
    import torch

    first = batches[0]
    if isinstance(first, dict):
        return {name: _together([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [_together(list(parts)) for parts in zip(*batches, strict=True)]
    return None if first is None else torch.cat(batches)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
