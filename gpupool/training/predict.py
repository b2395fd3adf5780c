"""Run a network over a data set on the ranks that train. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from gpupool.core.errors import TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.class_names import class_names
from gpupool.core.options.training_options import Precision
from gpupool.core.progress import progress
from gpupool.core.wire.calls import Predict
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.training.call import ask, inference_options
from gpupool.training.head import require_module
from gpupool.training.inputs import of_inputs

if TYPE_CHECKING:
    from torch import Tensor, nn


class Predictions(list[str]):
    """The name of the class of each sample, in order.

    `scores` are what the network gives, as without `names=True`: a tensor (samples, classes).
    `classes` are the names of its columns.
    """

    scores: Tensor
    classes: tuple[str, ...]


# `Tensor | Any`: an editor knows the tensor, and a network with several outputs is no mistake.
@overload
def predict(
    model: nn.Module,
    dataset: Any,
    *,
    names: Literal[False] = ...,
    batch_size: int = ...,
    precision: Precision = ...,
    pool: Pool | None = ...,
    **reading: Any,
) -> Tensor | Any: ...
@overload
def predict(
    model: nn.Module,
    dataset: Any,
    *,
    names: Literal[True],
    batch_size: int = ...,
    precision: Precision = ...,
    pool: Pool | None = ...,
    **reading: Any,
) -> Predictions: ...
def predict(
    model: nn.Module,
    dataset: Any,
    *,
    names: bool = False,
    batch_size: int = 256,
    precision: Precision = "float32",
    pool: Pool | None = None,
    **reading: Any,
) -> Any:
    """The outputs of `model` for every sample, in order, on the CPU.

    Each rank computes a part. Only the inputs of the data set's samples are used; the network is in
    evaluation mode and is called with them, be they a tensor, a dict or a list.

    Pictures are decoded as in training: uint8, 0..1 on the device, and what `result.model` knows:
    its normalization, and the height and width it was trained on, where pictures or files are given
    rather than a data set.

    Args:
        dataset: a data set with targets or without; a tensor or array (samples, ...); one picture
            or a list of them (of Pillow, uint8 arrays, paths, URLs); the URL of a folder, whose
            pictures come sorted by path; an iterator of inputs, which is read to its end first.
        names: the names of the classes instead of outputs: `Predictions`, a list of texts with
            `scores`.
        batch_size: samples per step over all ranks.
        precision: "float32", or "bf16" or "fp16" by `torch.autocast`; outputs are float32 then.
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: options of `TrainingOptions` that say how samples are read.

    Returns:
        A tensor of shape (samples, ...): for a classifier (samples, classes). Of a network
        with several outputs a dict or list of such; a named tuple becomes a dict. Samples are
        their first dimension: outputs (time, samples, ...) are an error, or wrong without a word
        where there are as many times as samples in a rank's share of a batch.

    Raises:
        TrainingError: the input is not a network or no data, or has classes that the network does
            not know; names of classes are asked for, and nobody knows them.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    given = (batch_size, precision, pool)
    return predicted(model, dataset, None, names, *given, **reading)


def predicted(
    model: nn.Module,
    given: Any,
    transform: Any,
    names: bool = False,
    batch_size: int = 256,
    precision: str = "float32",
    pool: Pool | None = None,
    **reading: Any,
) -> Any:
    """As `predict`; pictures that are no data set go through `transform`, unless it is None."""
    options = inference_options("predict", batch_size=batch_size, precision=precision, **reading)
    require_module(model)
    dataset = of_inputs(given, model)
    classes = info_of(model).classes or class_names(dataset) if names else ()
    if names and not classes:
        raise TrainingError(
            "names=True: neither the network nor the data know names of classes; train with data "
            "that have them, as an ImageDatastore, or take the index: predict(...).argmax(1)."
        )
    outputs = outputs_of(
        "predict", InferenceJob(model, dataset, options, transform=transform), pool
    )
    return _named(outputs, classes) if names else outputs


def outputs_of(what: str, job: InferenceJob, pool: Pool | None) -> Any:
    """What the ranks have computed for every sample, in order, on the CPU; see `ask`."""
    import torch

    # Before `ask`, which would do the same: the outputs need a place in the pool's folder.
    pool = current_pool(create=True) if pool is None else pool
    result_path = pool.engines.new_file("outputs.pt")
    # Through files: the controller would copy outputs several times, and hold them in memory.
    ask(what, pool, job, partial(Predict, result_name=result_path.name))
    paths = [
        pool.carrier.bring_file(rank, result_path.with_name(f"{result_path.name}.{i}"))
        for i, rank in enumerate(pool.training_ranks)
    ]
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


def main_output(outputs: Any) -> Any:
    """What a network is about, as torchvision's and Hugging Face's name it in a dict."""
    return outputs.get("logits", outputs.get("out")) if isinstance(outputs, dict) else outputs


def _named(outputs: Any, classes: Sequence[str]) -> Predictions:
    """The class of each sample by its highest score; of one score, the second of two above 0."""
    import torch

    outputs = main_output(outputs)
    is_tensor = isinstance(outputs, torch.Tensor)
    if is_tensor and outputs.ndim == 2 and outputs.shape[1] == 1 and len(classes) == 2:
        found = (outputs[:, 0] > 0).long()
    elif is_tensor and outputs.ndim == 2 and outputs.shape[1] >= len(classes):
        found = outputs[:, : len(classes)].argmax(1)
    else:
        shape = tuple(outputs.shape) if is_tensor else type(outputs).__name__
        raise TrainingError(
            f"names=True: the outputs are {shape}, not a score of each of {len(classes)} classes "
            "for each sample; take them as they are, without names."
        )
    names = Predictions(classes[index] for index in found.tolist())
    names.scores, names.classes = outputs, tuple(classes)
    return names


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
