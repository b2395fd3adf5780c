"""gpupool: a parallel pool for Jupyter, one worker per GPU.

    %load_ext gpupool
    %gpupool start               `%gpupool help` lists the commands
    %%spmd                       above a cell: run it on every rank

The pool
    start, current_pool          the pool of this notebook: run, put, interrupt, restart, stop
    gpus                         the GPUs of this machine and who uses them
Training
    train                        train a network on all ranks, with a live monitor
    TrainingOptions              how: `gpupool.TrainingOptions?` lists every option
    predict, evaluate, confusion use a trained network on a data set
    compare                      several trainings side by side
    sweep, log                   search parameters, a network on each rank; report, Pruned in it
    replace_head                 a network for your own classes
    save, load, load_weights     networks in files and stores
Data
    ImageDatastore, TarDatastore, SegmentationDatastore
Your own loop, in %%spmd cells
    shard_batches, weighted_loss, sync_batch_norm, Checkpoints, Metrics
    monitor                      its plots below the cell

docs/index.md says which page is for what; docs/reference has all commands and options.
Importing gpupool loads neither torch nor ipywidgets.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from gpupool.core import progress as _progress

__version__ = "0.1.0"

# The stub has the one list of public names, each with its module: for type checkers, and for this.
# No library reads it, as the host's processes stand on the standard library alone.
_STUB = Path(__file__).with_suffix(".pyi").read_text()
_MODULES = {name: module for module, name in re.findall(r"(?m)^from (\S+) import (\w+)", _STUB)}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpupool' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return __all__


# imported when something has lasted for a second
_progress.draw_with(
    lambda: importlib.import_module("gpupool.notebook.page.progress_view").open_drawing()
)
