"""gpupool: a parallel pool for Jupyter, one engine per GPU.

    %load_ext gpupool
    %gpupool start

Importing this package is quick and loads neither torch nor ipywidgets: names are looked up when
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpupool.core import progress as _progress

__version__ = "0.1.0"

# public name -> module that defines it
_NAMES = {
    "CallbackInfo": "gpupool.engine.callbacks",
    "Checkpoints": "gpupool.engine.checkpoint",
    "Composite": "gpupool.pool.composite",
    "Constant": "gpupool.pool.composite",
    "ConfusionMatrix": "gpupool.training.confusion",
    "CredentialsError": "gpupool.core.errors",
    "DataError": "gpupool.core.errors",
    "DataNotFoundError": "gpupool.core.errors",
    "EngineDiedError": "gpupool.core.errors",
    "GpuPoolError": "gpupool.core.errors",
    "ImageDatastore": "gpupool.data.datastore",
    "InlinePool": "gpupool.pool.inline",
    "Metrics": "gpupool.engine.own_metrics",
    "Monitor": "gpupool.engine.monitor",
    "NoPoolError": "gpupool.core.errors",
    "OptionsError": "gpupool.core.errors",
    "PlacementError": "gpupool.core.errors",
    "Pool": "gpupool.pool.pool",
    "PoolError": "gpupool.core.errors",
    "PoolOptions": "gpupool.core.options",
    "PoolStartError": "gpupool.core.errors",
    "Profile": "gpupool.core.training_options",
    "SampleError": "gpupool.core.errors",
    "SegmentationDatastore": "gpupool.data.segmentation",
    "SpmdError": "gpupool.core.errors",
    "StepTimer": "gpupool.engine.step_timer",
    "StepTimes": "gpupool.engine.step_timer",
    "StillRunningError": "gpupool.core.errors",
    "SpmdResult": "gpupool.pool.result",
    "TarDatastore": "gpupool.data.tar",
    "TrainingError": "gpupool.core.errors",
    "TrainingHistory": "gpupool.training.history",
    "TrainingOptions": "gpupool.core.training_options",
    "TrainingResult": "gpupool.training.result",
    "TrainingRun": "gpupool.training.run",
    "TransferError": "gpupool.core.errors",
    "confusion": "gpupool.training.confusion",
    "current_pool": "gpupool.pool.session",
    "evaluate": "gpupool.training.evaluate",
    "gpus": "gpupool.pool.gpus",
    "leftovers": "gpupool.pool.leftovers",
    "load_weights": "gpupool.data.weights",
    "monitor": "gpupool.engine.monitor",
    "predict": "gpupool.training.predict",
    "replace_head": "gpupool.training.head",
    "shard_batches": "gpupool.engine.pieces",
    "start": "gpupool.pool.session",
    "sync_batch_norm": "gpupool.engine.batch_norm",
    "train": "gpupool.notebook.training",
    "weighted_loss": "gpupool.engine.pieces",
}

__all__ = sorted([*_NAMES, "load_ipython_extension", "unload_ipython_extension"])


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'gpupool' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__


def _open_drawing(course: _progress.Course) -> _progress.Drawing | None:
    """What shows a course to the user; imported when something has lasted for a second."""
    from gpupool.notebook.progress_view import open_drawing

    return open_drawing(course)


_progress.draw_with(_open_drawing)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext gpupool` calls: registers the magics, and has torch imported by the time it
    is needed, in another process in the background."""
    from gpupool.core import current
    from gpupool.pool import agent

    if current.find_pool() is None:
        agent.warm()  # first: it imports torch while this process imports the magics

    from gpupool.notebook import magics

    magics.register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """What `%unload_ext gpupool` calls: takes the magics away again; a running pool goes on, an
    agent that waits for one ends."""
    from gpupool.notebook import magics
    from gpupool.pool import agent

    magics.unregister(shell)
    agent.close()


if TYPE_CHECKING:
    from gpupool.core.errors import CredentialsError as CredentialsError
    from gpupool.core.errors import DataError as DataError
    from gpupool.core.errors import DataNotFoundError as DataNotFoundError
    from gpupool.core.errors import EngineDiedError as EngineDiedError
    from gpupool.core.errors import GpuPoolError as GpuPoolError
    from gpupool.core.errors import NoPoolError as NoPoolError
    from gpupool.core.errors import OptionsError as OptionsError
    from gpupool.core.errors import PlacementError as PlacementError
    from gpupool.core.errors import PoolError as PoolError
    from gpupool.core.errors import PoolStartError as PoolStartError
    from gpupool.core.errors import SampleError as SampleError
    from gpupool.core.errors import SpmdError as SpmdError
    from gpupool.core.errors import StillRunningError as StillRunningError
    from gpupool.core.errors import TrainingError as TrainingError
    from gpupool.core.errors import TransferError as TransferError
    from gpupool.core.options import PoolOptions as PoolOptions
    from gpupool.core.training_options import Profile as Profile
    from gpupool.core.training_options import TrainingOptions as TrainingOptions
    from gpupool.data.datastore import ImageDatastore as ImageDatastore
    from gpupool.data.segmentation import SegmentationDatastore as SegmentationDatastore
    from gpupool.data.tar import TarDatastore as TarDatastore
    from gpupool.data.weights import load_weights as load_weights
    from gpupool.engine.batch_norm import sync_batch_norm as sync_batch_norm
    from gpupool.engine.callbacks import CallbackInfo as CallbackInfo
    from gpupool.engine.checkpoint import Checkpoints as Checkpoints
    from gpupool.engine.monitor import Monitor as Monitor
    from gpupool.engine.monitor import monitor as monitor
    from gpupool.engine.own_metrics import Metrics as Metrics
    from gpupool.engine.pieces import shard_batches as shard_batches
    from gpupool.engine.pieces import weighted_loss as weighted_loss
    from gpupool.engine.step_timer import StepTimer as StepTimer
    from gpupool.engine.step_timer import StepTimes as StepTimes
    from gpupool.notebook.training import train as train
    from gpupool.pool.composite import Composite as Composite
    from gpupool.pool.composite import Constant as Constant
    from gpupool.pool.gpus import gpus as gpus
    from gpupool.pool.inline import InlinePool as InlinePool
    from gpupool.pool.leftovers import leftovers as leftovers
    from gpupool.pool.pool import Pool as Pool
    from gpupool.pool.result import SpmdResult as SpmdResult
    from gpupool.pool.session import current_pool as current_pool
    from gpupool.pool.session import start as start
    from gpupool.training.confusion import ConfusionMatrix as ConfusionMatrix
    from gpupool.training.confusion import confusion as confusion
    from gpupool.training.evaluate import evaluate as evaluate
    from gpupool.training.head import replace_head as replace_head
    from gpupool.training.history import TrainingHistory as TrainingHistory
    from gpupool.training.predict import predict as predict
    from gpupool.training.result import TrainingResult as TrainingResult
    from gpupool.training.run import TrainingRun as TrainingRun
