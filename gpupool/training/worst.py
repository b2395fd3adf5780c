"""The samples on which a network has the highest losses. Runs on the client; draws nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.formatting import NONE
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.class_names import class_names
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.model_facts import chosen_loss
from gpupool.core.options.named_measures import check_loss
from gpupool.core.wire.calls import Worst
from gpupool.core.wire.replies import WorstSample
from gpupool.pool.pool import Pool
from gpupool.training.call import ask, inference_options
from gpupool.training.inputs import with_targets

if TYPE_CHECKING:
    from torch import nn

_MOST = 200  # pictures that a page should hold


@dataclass(frozen=True, eq=False)
class WorstSamples:
    """Samples with the highest losses, the highest first: a grid of pictures in a notebook, a table
    elsewhere. `len`, indexing and iteration give them one by one.

    `samples[i].png` is a small picture, b"" of what is no image; `files` are the names of their
    files, "" where nobody knows them. `classes` are the names of classes, () without.
    """

    samples: tuple[WorstSample, ...]
    files: tuple[str, ...]
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> WorstSample:
        return self.samples[number]

    @property
    def indices(self) -> list[int]:
        """Their places in the data set: `dataset[worst.indices[0]]` is the sample itself."""
        return [sample.index for sample in self.samples]

    @property
    def losses(self) -> list[float]:
        """The loss of each."""
        return [sample.loss for sample in self.samples]

    @property
    def found(self) -> list[Any]:
        """What the network takes each for: the name of a class or its index, or a number. None of
        masks, and of whatever else is more than that."""
        return [self._named(sample.found) for sample in self.samples]

    @property
    def true(self) -> list[Any]:
        """What each is, as `found`."""
        return [self._named(sample.true) for sample in self.samples]

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each in words: loss, found, true, index, file."""
        return [
            (f"{sample.loss:.4g}", _word(found), _word(true), f"{sample.index}", file)
            for sample, found, true, file in zip(
                self.samples, self.found, self.true, self.files, strict=True
            )
        ]

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each: index, loss, found, true, file.

        Raises TrainingError without pandas.
        """
        try:
            import pandas
        except ImportError:
            raise TrainingError(
                "worst.to_frame() needs pandas: pip install pandas, or read its .indices, .losses, "
                ".found and .true."
            ) from None
        columns = {"index": self.indices, "loss": self.losses, "found": self.found}
        return pandas.DataFrame({**columns, "true": self.true, "file": list(self.files)})

    def summary(self) -> str:
        """The whole in one line."""
        return f"the {len(self)} sample{'s' if len(self) != 1 else ''} with the highest loss"

    def __repr__(self) -> str:
        rows = [("loss", "found", "true", "index", "file"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([f"WorstSamples: {self.summary()}", *(f"  {line}" for line in lines)])

    def _named(self, value: int | float | None) -> Any:
        is_class = isinstance(value, int) and 0 <= value < len(self.classes)
        return self.classes[int(value or 0)] if is_class else value


def worst_samples(
    model: nn.Module,
    dataset: Any,
    num: int,
    loss: Any = "auto",
    batch_size: int = 256,
    precision: str = "float32",
    pool: Pool | None = None,
    **reading: Any,
) -> WorstSamples:
    """The `num` samples of a data set with the highest loss; see `TrainingResult.worst`."""
    if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= _MOST:
        raise OptionsError(f"worst({num!r}): give a number in 1..{_MOST}.")
    check_loss(loss)
    dataset = with_targets(dataset, model)
    if is_stream(dataset):
        raise TrainingError(
            "worst needs a data set whose samples have an index, and this is a stream; give some "
            "of its samples as a list."
        )
    loss = chosen_loss(loss, model)
    if loss in ("output", None):
        raise TrainingError(
            "worst needs the loss of each sample, and this network computes one of a whole batch: "
            "give a loss, as worst(16, loss='cross_entropy')."
        )
    options = inference_options("worst", batch_size=batch_size, precision=precision, **reading)
    job = InferenceJob(model, dataset, options, loss=loss)
    replies = ask("worst", pool, job, partial(Worst, num=num))
    # As on the ranks: NaN before all others, and of equal losses the first in the data set.
    found = sorted(
        (sample for samples in replies for sample in samples),
        key=lambda one: (one.loss == one.loss, -one.loss, one.index),
    )[:num]
    names = info_of(model).classes or class_names(dataset)
    files = tuple(_file(dataset, sample.index) for sample in found)
    return WorstSamples(tuple(found), files, names)


def _file(dataset: Any, index: int) -> str:
    """The name of the file that a sample is from; "" if the data set does not know it."""
    # Data sets that are parts of others have the index in those.
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        return _file(dataset.dataset, int(dataset.indices[index]))
    for part in getattr(dataset, "datasets", ()):
        if index < len(part):
            return _file(part, index)
        index -= len(part)
    if hasattr(dataset, "manifest"):  # a datastore of ours
        return str(dataset.name(index))
    listed: Sequence[Any] = getattr(dataset, "samples", None) or ()  # torchvision's ImageFolder
    pair = listed[index] if isinstance(listed, list) and index < len(listed) else None
    is_file = isinstance(pair, tuple) and pair and isinstance(pair[0], (str, os.PathLike))
    return os.fspath(pair[0]) if is_file and pair else ""


def _word(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:.4g}" if isinstance(value, float) else str(value)
