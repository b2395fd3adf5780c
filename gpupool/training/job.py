"""What a training needs, checked before any rank starts, and packed. Runs on the client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupool.core import jobs
from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.jobs import InferenceJob, JobPacker, TrainingJob
from gpupool.core.options.datasets import num_samples, require_dataset
from gpupool.core.options.effects import check_for
from gpupool.core.options.model_facts import check_parameters
from gpupool.core.options.named_measures import check_loss, check_metrics
from gpupool.core.options.sampling import with_data
from gpupool.core.options.schedule import check_for_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import BYTES, progress
from gpupool.core.wire.pickles import WHOLE
from gpupool.core.wire.pickles import part as in_parcel
from gpupool.core.wire.state_dicts import check_extra_state
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.pool import Pool
from gpupool.pool.variables.delivery import sources_of
from gpupool.pool.variables.kept_data import Place
from gpupool.training.head import require_module

if TYPE_CHECKING:
    from torch import nn


def checked(
    pool: Pool,
    model: nn.Module,
    dataset: Any,
    loss: Any,
    options: TrainingOptions,
    validation: Any,
) -> TrainingOptions:
    """The options as they hold on the ranks that train.

    Raises:
        TrainingError: the input cannot be trained on.
        OptionsError: an option is wrong for it, or would do nothing.
    """
    check_input(model, dataset, loss, validation)
    if not isinstance(options, TrainingOptions):
        raise OptionsError(
            f"options={options!r}: give a gpupool.TrainingOptions(...).", "type", "options"
        )
    check_metrics(options.metrics)
    # Made absolute by the client, in whose folder they were written: a cell may move a rank.
    options = with_absolute_paths(options.resolve(len(pool.training_ranks)))
    options = with_data(options, dataset)
    num = num_samples(dataset)
    check_for(options, has_validation=validation is not None, num_samples=num)
    if num is None:
        check_for_stream(options)
    check_parameters(model, options)
    # Now, not when it is saved: after hours of training it would be too late.
    check_extra_state(model, in_checkpoints=options.checkpoint is not None)
    return options


def check_input(model: nn.Module, dataset: Any, loss: Any, validation: Any) -> None:
    """Refuse what cannot be trained on any pool: see `checked`."""
    require_module(model)
    require_dataset("dataset", dataset)
    if validation is not None:
        require_dataset("validation", validation)
    check_loss(loss)


@dataclass(frozen=True)
class SentJob:
    """A job that ranks can read from `path`, until `remove`.

    It holds the `places` of its data, whatever becomes of the data in the notebook meanwhile, and
    refers to `constants` that the ranks have.
    """

    path: Path
    places: list[Place]
    constants: frozenset[int]

    def bring_constants(self, pool: Pool, ranks: Sequence[int]) -> None:
        """Make sure that these ranks, of which some may be new, have what the job refers to."""
        if self.constants:
            pool.variables.bring(self.constants, ranks)

    def remove(self) -> None:
        """No rank needs it any more."""
        self.path.unlink(missing_ok=True)  # gone with the folder when the pool was stopped
        self.places.clear()


def write_job(pool: Pool, job: TrainingJob | InferenceJob) -> SentJob:
    """Pickle a job into the pool's private folder, and the data of its data sets beside it.

    Raises:
        TrainingError: a part of it cannot be pickled; the message names it.
    """
    with progress("Sending the network and the data set", unit=BYTES) as bar:
        packed = _Packer(pool)
        try:
            packed.dump_job(job)
        except Exception as error:  # pickling runs arbitrary code of the objects' classes
            # Pickled part by part only after a failure, as it takes as long again.
            name = next(n for n, part in vars(job).items() if not _can_pickle(pool, part))
            raise TrainingError(
                f"{name} cannot be sent to the ranks: {error}", "cannot send", name
            ) from None
        bar.update(0, packed.num_bytes)
        num = packed.num_data
        places = pool.variables.kept_data.store(
            packed.buffers[:num], packed.owners[:num], bar.advance
        )
        kept = {
            number: (place.file.path, place.position)
            for number, place in enumerate(places)
            if place is not None
        }
        path = pool.new_file("job.pkl")
        # With the text, tracebacks of the ranks show lines of the notebook's cells.
        sources = sources_of(packed.filenames)
        jobs.write(path, packed, notebook_place().sys_path, sources, kept, bar.advance)
    return SentJob(path, list(filter(None, places)), frozenset(packed.constants))


class _Packer(JobPacker):
    """Packs a job for a pool: what `pool.put` has brought to its ranks is referred to."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.constants: set[int] = set()
        self._known = pool.variables.constants

    def reducer_override(self, obj: Any) -> Any:
        """How a part is pickled."""
        number = self._known.number_of(obj)
        if number is None:
            return super().reducer_override(obj)
        self.constants.add(number)
        return in_parcel, (number, WHOLE)


def _can_pickle(pool: Pool, part: object) -> bool:
    try:
        _Packer(pool).dump(part)
    except Exception:  # as above; the caller reports it
        return False
    return True


def with_absolute_paths(options: TrainingOptions) -> TrainingOptions:
    """The options with relative paths made absolute; URLs stay."""
    resume, profile = options.resume, options.profile
    names_one = isinstance(resume, str) and resume != "auto"
    return replace(
        options,
        checkpoint=options.checkpoint and _absolute(options.checkpoint),
        tensorboard=options.tensorboard and _absolute(options.tensorboard),
        resume=_absolute(str(resume)) if names_one else resume,
        profile=profile and replace(profile, url=_absolute(profile.url)),
    )


def _absolute(url: str) -> str:
    # "::" chains file systems in fsspec's URLs, as in "zip::s3://...".
    if "://" in url or "::" in url:
        return url
    return os.path.abspath(os.path.expanduser(url))
