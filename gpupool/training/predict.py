"""Run a network over a data set on the ranks that train. Runs on the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpupool.pool.notices import NoticeLines
from gpupool.pool.result import OutputRecorder
from gpupool.pool.session import current_pool
from gpupool.training.head import require_module
from gpupool.training.run import require_dataset, write_job

if TYPE_CHECKING:
    from torch import Tensor, nn


def predict(model: nn.Module, dataset: Any, *, batch_size: int = 256) -> Tensor:
    """The outputs of `model` for every sample, in order, as one CPU tensor.

    Each rank computes a contiguous part. Only the inputs of the data set's samples are used.

    Args:
        batch_size: samples per step over all ranks.

    Returns:
        Shape (len(dataset), ...): for a classifier (samples, classes).

    Raises:
        TrainingError: the input is not a network or not a data set.
        SpmdError: a rank failed.
    """
    import torch

    require_module(model)
    require_dataset("dataset", dataset)
    pool = current_pool(create=True)
    job_path = write_job(pool, {"model": model, "dataset": dataset, "batch_size": batch_size})
    result_path = pool.new_file("outputs.pt")
    payload = {"job_path": str(job_path), "result_path": str(result_path)}
    ranks = pool.training_ranks
    recorder = OutputRecorder(ranks, pool.hidden_values())
    payloads = dict.fromkeys(ranks, payload)
    pool.execute("predict", payloads, recorder, on_notice=NoticeLines()).result()
    paths = [result_path.with_name(f"{result_path.name}.{i}") for i in range(len(ranks))]
    parts = [torch.load(path, weights_only=True) for path in paths]
    for path in (job_path, *paths):
        path.unlink()
    return torch.cat([part for part in parts if part is not None])
