"""What a training, and what else runs a network over data, is given: pickled into a file. Anywhere.

It goes through a file in the pool's private folder, as models are large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpupool.core.options.training_options import TrainingOptions


@dataclass(frozen=True)
class TrainingJob:
    """A training: `model` on `dataset`, as `options` say."""

    model: Any
    dataset: Any
    loss: Any
    options: TrainingOptions
    validation: Any


@dataclass(frozen=True)
class InferenceJob:
    """A network over a data set; `metrics` and `loss` are what is to be evaluated."""

    model: Any
    dataset: Any
    batch_size: int
    precision: str
    metrics: Any = ()
    loss: Any = None
