"""What a training needs, checked before any rank starts, and packed. Runs on the client."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpupool.core.errors import PoolError, TrainingError
from gpupool.core.jobs import InferenceJob, JobPacker, TrainingJob
from gpupool.core.options.datasets import is_stream, require_dataset, with_data
from gpupool.core.options.effects import check_for
from gpupool.core.options.model_facts import check_parameters, chosen_loss
from gpupool.core.options.named_measures import check_loss, check_metrics
from gpupool.core.options.training_options import Profile, TrainingOptions
from gpupool.core.wire.pickles import why_not
from gpupool.core.wire.reductions import with_imports_by_name
from gpupool.core.wire.state_dicts import check_extra_state
from gpupool.core.wire.values import Job
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.pool import Pool
from gpupool.pool.variables.buffers import Stored
from gpupool.pool.variables.parcels import sources_of
from gpupool.training.binding import bind_training
from gpupool.training.head import require_module
from gpupool.training.inputs import absolute, with_targets

if TYPE_CHECKING:
    from torch import nn


_PLACES = ("checkpoint", "tensorboard", "resume", "profile")


def prepared(
    model: nn.Module, dataset: Any, loss: Any, options: TrainingOptions, validation: Any
) -> TrainingJob:
    """What is to be trained, as it holds on the ranks that train.

    Raises:
        TrainingError: the input cannot be trained on.
        OptionsError: an option is wrong for it, or would do nothing.
    """
    dataset, validation = with_targets(dataset, model), with_targets(validation, model)
    check_input(model, dataset, loss, validation)
    check_metrics(options.metrics)
    # Made absolute by the client, in whose folder they were written: a cell may move a rank.
    options = with_data(with_absolute_paths(options), dataset)
    num = None if is_stream(dataset) else len(dataset)
    check_for(options, has_validation=validation is not None, num_samples=num)
    check_parameters(model, options)
    # Now, not when it is saved: after hours of training it would be too late.
    check_extra_state(model)
    job = TrainingJob(model, dataset, chosen_loss(loss, model), options, validation)
    return bind_training(job)


def check_input(model: nn.Module, dataset: Any, loss: Any, validation: Any) -> None:
    """Refuse what cannot be trained on any pool: see `prepared`."""
    require_module(model)
    require_dataset("dataset", dataset)
    if validation is not None:
        require_dataset("validation", validation)
    check_loss(loss)


class SentJob(NamedTuple):
    """A job that ranks can read.

    `contents` keep its memory, whatever becomes of the data in the notebook meanwhile, until they
    are cleared; `constants` are those that it refers to, and that ranks have to have.
    """

    wire: Job
    contents: list[Stored | None]
    constants: set[int]

    def bring_constants(self, pool: Pool, ranks: Sequence[int]) -> None:
        """Make sure that these ranks, of which some may be new, have what the job refers to."""
        if self.constants:
            pool.variables.bring(self.constants, ranks)


def send_job(pool: Pool, job: TrainingJob | InferenceJob) -> SentJob:
    """Pack a job into memory that ranks map; that of its data sets stays while these live.

    Raises:
        TrainingError: a part of it cannot be packed, and which; or there is too little memory.
    """
    parcels, buffers = pool.variables.parcels, pool.variables.buffers

    def pack(part: object) -> JobPacker:
        packer = JobPacker(parcels.parcel_of)
        packer.dump(part)
        return packer

    def packed(part: object) -> JobPacker:
        return with_imports_by_name(partial(pack, part))

    try:
        packer = packed(job)
    except Exception as error:  # pickling runs arbitrary code of the objects' classes
        why = why_not(error, job, "job", packed)
        raise TrainingError(f"what was given cannot be sent to the ranks: {why}") from None
    try:
        wire, contents = buffers.pack(packer, "the network and the data set")
    except PoolError as error:
        raise TrainingError(f"the data set cannot be sent: {error}") from None
    datasets: tuple[Any, ...] = (job.dataset, getattr(job, "validation", None))
    for dataset in datasets:
        while type(dataset).__name__ == "Subset":  # whose data are those of the whole
            dataset = dataset.dataset
        buffers.keep(dataset, contents[: packer.num_data])
    # With the text, tracebacks of the ranks show lines of the notebook's cells.
    sources = sources_of(packer.filenames)
    sent = Job(uuid.uuid4().hex, wire, notebook_place().sys_path, sources)
    return SentJob(sent, contents, packer.constants)


def with_absolute_paths(options: TrainingOptions) -> TrainingOptions:
    """The options with relative paths made absolute; URLs stay."""
    given = {name: getattr(options, name) for name in _PLACES}
    paths: dict[str, Any] = {
        name: absolute(value)
        for name, value in given.items()
        if isinstance(value, str) and value != "auto"
    }
    if isinstance(options.profile, Profile):
        paths["profile"] = replace(options.profile, url=absolute(options.profile.url))
    return replace(options, **paths)
