"""Have the ranks that train run a network over a data set. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.datasets import require_dataset
from gpupool.core.options.named_measures import CLASS_METRICS
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Progress, progress
from gpupool.core.wire.calls import Call
from gpupool.core.wire.events import ProgressEvent
from gpupool.core.wire.output import OnOutput, OutputKind
from gpupool.core.wire.replies import Value
from gpupool.core.wire.values import Job
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.training.binding import bind, num_outputs
from gpupool.training.head import require_module
from gpupool.training.job import send_job

# What a training and a pass over a data set have in common: how samples are read and computed.
_OPTIONS = ("batch_size", "precision", "workers", "collate", "inputs", "targets", "seed")
_WHAT = {
    "predict": "Predicting",
    "evaluate": "Evaluating",
    "confusion": "Counting classes",
    "worst": "Looking for the highest losses",
}


def ask(
    what: str, pool: Pool | None, job: InferenceJob, call: Callable[[Job], Call[Value]]
) -> list[Value]:
    """Have the ranks that train do a job, which is checked; the values in the order of the ranks.

    Args:
        what: the function of the user's that asks.
        call: makes the call of the job that was sent.

    Raises:
        TrainingError: the model is no network, the data set is none, or something cannot be sent.
        SpmdError: a rank failed.
    """
    require_module(job.model)
    require_dataset("dataset", job.dataset)
    dataset = bind(job.model, job.dataset, what)
    num_classes = num_outputs(dataset, _class_loss(what, job))
    known = info_of(job.model)
    job = replace(job, dataset=dataset, num_classes=num_classes, network=known)
    pool = current_pool(create=True) if pool is None else pool
    if not isinstance(pool, Pool):
        raise TrainingError(f"pool={pool!r}: give what gpupool.start() returns, or leave it out.")
    sent = send_job(pool, job)
    ranks = pool.training_ranks
    calls = dict.fromkeys(ranks, call(sent.wire))
    try:
        sent.bring_constants(pool, ranks)
        with progress(_WHAT[what], unit="samples") as bar:
            recorder = OutputRecorder(ranks, pool.secrets, _listener(bar))
            values = Execution(pool, calls, recorder).result()
    # Also after an error: the job holds the network and the data set, and may be large.
    finally:
        sent.remove()
    return [values[rank] for rank in ranks]


def _class_loss(what: str, job: InferenceJob) -> Any:
    """The loss over classes that a job asks for, or another one of the same targets."""
    metrics = [job.metrics] if isinstance(job.metrics, str) else job.metrics
    are_names = not isinstance(metrics, Mapping) and any(m in CLASS_METRICS for m in metrics)
    return "cross_entropy" if what == "confusion" or are_names else job.loss


def inference_options(what: str, **given: Any) -> TrainingOptions:
    """The options of a pass over a data set.

    Raises:
        OptionsError: one is wrong, or does nothing without training.
    """
    known = [name for name in _OPTIONS if name in TrainingOptions.__dataclass_fields__]
    for name in given:
        if name in TrainingOptions.__dataclass_fields__ and name not in known:
            raise OptionsError(f"{name} does nothing in {what}(), which takes {', '.join(known)}.")
    return TrainingOptions(**given)


def _listener(bar: Progress) -> OnOutput:
    """A listener that has `bar` show how far the ranks are; it drops what they print."""

    def listen(rank: int, kind: OutputKind, content: Any) -> None:
        for event in content if kind is OutputKind.EVENTS else ():
            if not isinstance(event, ProgressEvent):
                continue
            # What a rank does besides, listing a bucket say, is a note in the same bar.
            if event.what == "samples":
                bar.update(event.done, event.total or None)
            else:
                bar.tell("" if 0 < event.total <= event.done else event.what)

    return listen
