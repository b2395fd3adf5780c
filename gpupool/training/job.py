"""A job for the ranks: what the user gives, as data sets, checked, bound and packed. Client."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpupool.core.errors import OptionsError, PoolError, TrainingError
from gpupool.core.jobs import InferenceJob, JobPacker, TrainingJob
from gpupool.core.network import NetworkInfo, Scaling, in_words, info_of
from gpupool.core.options import datasets
from gpupool.core.options.model_facts import check_parameters, chosen_loss
from gpupool.core.options.named_measures import CLASS_METRICS, check_loss, check_metrics
from gpupool.core.options.training_options import TrainingOptions, check_for
from gpupool.core.wire.pickles import why_not
from gpupool.core.wire.reductions import with_imports_by_name
from gpupool.core.wire.state_dicts import check_extra_state
from gpupool.core.wire.values import Job
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.pool import Pool
from gpupool.pool.variables.buffers import Stored
from gpupool.pool.variables.composite import value_of
from gpupool.pool.variables.parcels import sources_of
from gpupool.training.head import require_module

if TYPE_CHECKING:
    from torch import Tensor, nn

_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_CLASS_LOSSES = ("cross_entropy", "nll", "CrossEntropyLoss", "NLLLoss")


# ---- arrays, pictures and URLs in the place of a data set ----------------------------------------


def with_targets(given: Any, model: nn.Module) -> Any:
    """A TensorDataset of a pair (inputs, targets) of arrays or tensors; of a Constant its value;
    anything else as it is. Raises TrainingError for a pair of different lengths."""
    given = value_of(given)
    if not (isinstance(given, tuple) and len(given) == 2 and all(map(_is_array, given))):
        return given
    from torch.utils.data import TensorDataset

    inputs, targets = _as_tensor(given[0], model), _as_tensor(given[1], model, is_target=True)
    if len(inputs) != len(targets):
        raise TrainingError(
            f"there are {len(inputs):,} inputs and {len(targets):,} targets: give as many of both."
        )
    return TensorDataset(inputs, targets)


def of_inputs(given: Any, model: nn.Module) -> Any:
    """What ranks make a data set of: tensors, lists of pictures or of their URLs, data sets.
    A URL of a folder becomes a datastore, which lists it here, once."""
    given = value_of(given)
    is_place = isinstance(given, (str, os.PathLike))
    if is_place and not os.fspath(given).lower().endswith(_PICTURES):
        import gpupool

        return gpupool.ImageDatastore(os.fspath(given), labels=None)
    if is_place or _is_picture(given):
        given = [given]
    given = list(given) if hasattr(given, "__next__") else with_targets(given, model)
    if isinstance(given, (list, tuple)) and given:
        if all(isinstance(one, (str, os.PathLike)) for one in given):
            return [absolute(os.fspath(one)) for one in given]
        if isinstance(given[0], (int, float, list)):
            given = np.asarray(given)
    return _as_tensor(given, model) if _is_array(given) else given


def _as_tensor(given: Any, model: nn.Module, *, is_target: bool = False) -> Tensor:
    """A tensor as it is; an array in the precision of the network, whole targets as int64.

    uint8 arrays (..., height, width, channels) are pictures, as of Pillow: channels come first
    then. A single picture becomes one of a batch.
    """
    import torch

    if isinstance(given, torch.Tensor):
        found, is_picture = given, given.dtype == torch.uint8 and given.shape[:-2] in ((1,), (3,))
    else:
        array = np.asarray(given)
        if array.dtype.kind not in "biuf":
            raise TrainingError(
                f"an array of {array.dtype} is none of numbers; give numbers, or a data set."
            )
        is_picture = array.dtype == np.uint8 and array.ndim in (3, 4) and array.shape[-1] in (1, 3)
        if is_picture and not is_target:
            array = np.moveaxis(array, -1, -3)
        found = torch.from_numpy(np.ascontiguousarray(array))
        if found.is_floating_point():
            found = found.to(next((p.dtype for p in model.parameters()), torch.float32))
        elif is_target and found.dtype != torch.bool:
            found = found.long()
    return found[None] if is_picture and not is_target and found.ndim == 3 else found


def _is_array(given: Any) -> bool:
    # numpy's, torch's, and what can become one of numpy's.
    return hasattr(given, "shape") and hasattr(given, "__array__") and not _is_picture(given)


def _is_picture(given: Any) -> bool:
    # Pillow is not imported for this.
    return any(cls.__module__ == "PIL.Image" for cls in type(given).__mro__)


def absolute(url: str) -> str:
    """A path as seen from any folder: a cell may move its rank to another. URLs stay."""
    # "::" chains file systems in fsspec's URLs, as in "zip::s3://...".
    return url if "://" in url or "::" in url else os.path.abspath(os.path.expanduser(url))


def prepared(
    model: nn.Module, dataset: Any, loss: Any, options: TrainingOptions, validation: Any
) -> TrainingJob:
    """What is to be trained. Raises TrainingError for input that cannot be trained on, OptionsError
    for an option that is wrong for it, or would do nothing."""
    dataset, validation = with_targets(dataset, model), with_targets(validation, model)
    check_input(model, dataset, loss, validation)
    check_metrics(options.metrics)
    options = datasets.with_data(with_absolute_paths(options), dataset)
    num = None if datasets.is_stream(dataset) else len(dataset)
    check_for(options, has_validation=validation is not None, num_samples=num)
    check_parameters(model, options)
    # Now, not when it is saved: after hours of training it would be too late.
    check_extra_state(model)
    return _matched(TrainingJob(model, dataset, chosen_loss(loss, model), options, validation))


def check_input(model: nn.Module, dataset: Any, loss: Any, validation: Any) -> None:
    require_module(model)
    datasets.require_dataset("dataset", dataset)
    if validation is not None:
        datasets.require_dataset("validation", validation)
    check_loss(loss)


def with_absolute_paths(options: TrainingOptions) -> TrainingOptions:
    given = {name: getattr(options, name) for name in ("checkpoint", "resume", "profile")}
    paths: dict[str, Any] = {
        name: absolute(value)
        for name, value in given.items()
        if isinstance(value, str) and value != "auto"
    }
    return replace(options, **paths)


# ---- what data and network know of each other: classes by name, normalization, numbers -----------


def _matched(job: TrainingJob) -> TrainingJob:
    known, fits = info_of(job.model), job.options.normalize == "fit"
    names = known.classes or datasets.class_names(job.dataset)
    whose = "the network does" if known.classes else "the training data do"
    dataset = datasets.bound(job.dataset, names, "dataset", whose)
    validation = datasets.bound(job.validation, names, "validation", whose)
    labels = datasets.labels_of(dataset)
    if labels is not None and len(labels) and (labels == datasets.NO_CLASS).all():
        raise TrainingError(
            "the images of dataset have no labels, and training needs them: see labels= of "
            "gpupool.ImageDatastore."
        )
    own = None if fits else _scaling_of(dataset)
    scaling = own or (None if fits else known.normalization)
    if not fits:
        _check_scaling("validation", validation, "the training data", scaling)
    num_classes = max(_num_outputs(one, job.loss) for one in (dataset, validation))
    is_raw = own is None and (fits or scaling is not None)
    network = NetworkInfo(names, scaling, from_raw=is_raw)
    return replace(
        job, dataset=dataset, validation=validation, network=network, num_classes=num_classes
    )


def bind(job: InferenceJob, what: str) -> InferenceJob:
    """The job with its data as the network counts its classes; what has no names stays as it is.
    Raises TrainingError for classes that it does not know, OptionsError for another normalization.
    """
    known, dataset = info_of(job.model), job.dataset
    names, ours = datasets.class_names(dataset), known.normalization
    # Pictures below one folder that is no class are new ones, to be predicted.
    if not (what == "predict" and len(names) == 1 and names[0] not in known.classes):
        dataset = datasets.bound(dataset, known.classes, "dataset", "the network does")
    own = None if ours is None else _check_scaling("dataset", dataset, "the network", ours)
    # Tensors and new pictures are raw, and so are data like those of a training on raw ones;
    # other data sets with classes may be normalized in their own way.
    if ours is not None and own is None and names and not known.from_raw:
        warnings.warn(
            f"{what}: the data set has no normalization; that of the network's training is applied "
            f"({in_words(ours)}). Its own transform must not normalize as well.",
            stacklevel=2,
        )
    # With a metric of classes, the outputs must be as many, as with a loss over classes.
    metrics = [job.metrics] if isinstance(job.metrics, str) else job.metrics
    are_names = not isinstance(metrics, Mapping) and any(m in CLASS_METRICS for m in metrics)
    loss = "cross_entropy" if what == "confusion" or are_names else job.loss
    return replace(job, dataset=dataset, network=known, num_classes=_num_outputs(dataset, loss))


def _scaling_of(dataset: Any) -> Scaling | None:
    """The normalization that a data set asks for, or all that it is made of; None without one."""
    found = getattr(dataset, "normalization", None)
    if found is not None:
        mean, std = found
        return tuple(map(float, mean)), tuple(map(float, std))
    asked = {_scaling_of(part) for part in datasets.parts_of(dataset)}
    return asked.pop() if len(asked) == 1 else None


def _check_scaling(what: str, dataset: Any, whose: str, ours: Scaling | None) -> Scaling | None:
    """The normalization of a data set: none, or that of the others."""
    own = _scaling_of(dataset)
    if own is not None and own != ours:
        there = "has none" if ours is None else f"has {in_words(ours)}"
        raise OptionsError(
            f"{what} has a normalization of its own ({in_words(own)}), and {whose} {there}: give "
            "both the same by with_normalization."
        )
    return own


def _num_outputs(dataset: Any, loss: Any) -> int:
    """How many outputs a loss over classes needs; 0 for others, and where only samples show it."""
    if (loss if isinstance(loss, str) else type(loss).__name__) not in _CLASS_LOSSES:
        return 0
    num_names, labels = len(datasets.class_names(dataset)), datasets.labels_of(dataset)
    if labels is None:
        return num_names
    ignored = getattr(loss, "ignore_index", datasets.NO_CLASS)
    counted = labels[(labels != ignored) & (labels != datasets.NO_CLASS)]
    # On a GPU it would cost the rank.
    if len(counted) and counted.min() < 0:
        raise TrainingError(
            f"the targets have class {counted.min()}: classes are counted from 0, and {ignored} "
            "means none."
        )
    return max(num_names, int(counted.max(initial=-1)) + 1)


# ---- to the ranks --------------------------------------------------------------------------------


class SentJob(NamedTuple):
    """What ranks read. `contents` keep its memory until they are cleared, whatever becomes of the
    data in the notebook; `constants` are those that it refers to."""

    wire: Job
    contents: list[Stored | None]
    constants: set[int]

    def bring_constants(self, pool: Pool, ranks: Sequence[int]) -> None:
        """Make sure that these ranks, of which some may be new, have what the job refers to."""
        if self.constants:
            pool.variables.bring(self.constants, ranks)


def send_job(pool: Pool, job: TrainingJob | InferenceJob) -> SentJob:
    """Pack a job into memory that ranks map; that of its data sets stays while these live.
    Raises TrainingError where a part cannot be packed, or there is too little memory."""
    parcels, buffers = pool.variables.parcels, pool.variables.buffers

    def packed(part: object) -> JobPacker:
        def pack() -> JobPacker:
            packer = JobPacker(parcels.parcel_of)
            packer.dump(part)
            return packer

        return with_imports_by_name(pack)

    try:
        packer = packed(job)
    except Exception as error:  # pickling runs arbitrary code of the objects' classes
        why = why_not(error, job, "job", packed)
        raise TrainingError(f"what was given cannot be sent to the ranks: {why}") from None
    try:
        wire, contents = buffers.pack(packer, "the network and the data set")
    except PoolError as error:
        raise TrainingError(f"the data set cannot be sent: {error}") from None
    used: tuple[Any, ...] = (job.dataset, getattr(job, "validation", None))
    for dataset in used:
        while type(dataset).__name__ == "Subset":  # whose data are those of the whole
            dataset = dataset.dataset
        buffers.keep(dataset, contents[: packer.num_data])
    # With the text, tracebacks of the ranks show lines of the notebook's cells.
    sources = sources_of(packer.filenames)
    sent = Job(uuid.uuid4().hex, wire, notebook_place().sys_path, sources)
    return SentJob(sent, contents, packer.constants)
