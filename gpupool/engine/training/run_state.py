"""All that a training holds, as plain data and back again. Runs on engines, also under `torchrun`.

What comes out is read by `torch.load(weights_only=True)`: dicts, lists, numbers, strings, tensors.
Random numbers are not in it: those of a step depend on (seed, rank, step) alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from gpupool.core.errors import TrainingError
from gpupool.core.network import NetworkInfo
from gpupool.core.wire.events import StepEvent, ValidationEvent
from gpupool.core.wire.state_dicts import load
from gpupool.data.reading.normalization import Normalization
from gpupool.engine.batches.share import Dataset, num_samples
from gpupool.engine.training.event_log import EventLog
from gpupool.engine.training.run import Run

FORMAT = 2
_MAX_CHARS = 200  # of torch's words in ours


def capture(run: Run) -> dict[str, Any]:
    """What the next step changes: tensors where they are, to be copied now.

    The keys of this and of `facts` are the format of the file.
    """
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "ema": run.ema.state_dict() if run.ema is not None else None,
    }


def facts(
    run: Run, event_log: EventLog, dataset: Dataset, unreported: Sequence[StepEvent] = ()
) -> dict[str, Any]:
    """The rest, which stays as it is: numbers, copies, and tensors that are replaced as a whole."""
    normalization = run.normalization
    return {
        "format": FORMAT,
        "step": run.step,
        "epoch": run.epoch,
        "samples_done": run.samples_done,
        "elapsed_s": run.reporter.elapsed_s,
        "judge": run.early_stopping.state_dict(),
        "kept": run.kept,
        "kept_step": run.kept_step,
        "normalization": None if normalization is None else [list(n) for n in normalization],
        "network": run.network.plain(),
        "told": event_log.state(unreported),
        "last_step": _plain(run.reporter.last_step),
        "last_validation": _plain(run.reporter.last_validation),
        "training": _identity(run, dataset),
    }


def restore(run: Run, dataset: Dataset, state: Mapping[str, Any], url: str) -> None:
    """Make `run` what it was when `state` was captured, on however many ranks.

    Options of the optimizer are those of now: a learning rate may have been changed.

    Raises TrainingError if the state is of another training; `url` says where it is from.
    """
    if state.get("format") != FORMAT:
        raise TrainingError(
            f"resume: {url} has format {state.get('format')}, this version of gpupool reads "
            f"{FORMAT}; resume with the version that has written it."
        )
    # First everything that can be refused: a run must not be half of one and half of the other.
    now = _identity(run, dataset)
    _check_identity(state, now, dataset, url)
    try:
        _check_optimizer(state["training"]["optimizer"], now["optimizer"])
        load(run.model, state["model"])
        _load_optimizer(run.optimizer, state["optimizer"], run.options.optimizer)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"resume: {url} is of another network or optimizer ({_first_problem(error)}); give "
            "those it was made with, or start from scratch without resume."
        ) from None
    for name, part in (("scaler", run.scaler), ("ema", run.ema)):
        if (part is None) != (state[name] is None):
            option = {"scaler": "precision", "ema": "ema"}[name]
            had = "without" if state[name] is None else "with"
            raise TrainingError(
                f"resume: {url} was made {had} {option}, which this training differs in; give the "
                f"same {option}."
            )
        if part is not None:
            _load_part(part, state[name])
    run.early_stopping.load_state_dict(state["judge"])
    run.kept, run.kept_step = state["kept"], state["kept_step"]
    run.input_shape = NetworkInfo.of_plain(state["network"]).input_shape
    # What the data ask for now holds; what was measured is not measured again.
    if state["normalization"] is not None and run.normalization is None:
        run.normalization = Normalization(*(tuple(part) for part in state["normalization"]))
    run.step, run.epoch = state["step"], state["epoch"]
    run.samples_done = state["samples_done"]
    run.reporter.resume_time(state["elapsed_s"])
    if state["last_step"] is not None:
        run.reporter.last_step = StepEvent(**state["last_step"])
    if state["last_validation"] is not None:
        run.reporter.last_validation = ValidationEvent(**state["last_validation"])


def _first_problem(error: BaseException) -> str:
    """The first of what torch lists, under a headline that says nothing more."""
    headline, *listed = str(error).split("\n")
    first = listed[0].strip() if listed and headline.endswith(":") else headline
    return first.rstrip(".") if len(first) <= _MAX_CHARS else f"{first[:_MAX_CHARS]}..."


def _load_part(part: AveragedModel | torch.amp.GradScaler, state: Mapping[str, Any]) -> None:
    if isinstance(part, AveragedModel):  # with the buffers that its network has made
        load(part, state)
    else:
        part.load_state_dict(dict(state))


def _plain(event: StepEvent | ValidationEvent | None) -> dict[str, Any] | None:
    return None if event is None else asdict(event)


def epoch_of(run: Run) -> int:
    """The epoch of the last complete step; 0 before the first. `run` may be in the next already."""
    if not run.step:
        return 0
    return run.epoch if run.samples_done else run.epoch - 1


def _identity(run: Run, dataset: Dataset) -> dict[str, Any]:
    """What makes the order of the samples, and the data."""
    options, classes = run.options, getattr(dataset, "classes", None)
    return {
        "num_samples": num_samples(dataset),
        "classes": None if classes is None else [str(name) for name in classes],
        "seed": options.seed,
        "shuffle": options.shuffle,
        "batch_size": options.batch_size,
        "weights": _digest(options.weights),
        "normalize": options.normalize,
        "optimizer": options.optimizer if isinstance(options.optimizer, str) else "its own",
    }


def _digest(numbers: Any) -> str | None:
    """Which numbers these are, one for each sample: too many to be kept."""
    return None if numbers is None else f"{zlib.crc32(numbers):08x}"


def _check_identity(
    state: Mapping[str, Any], now: Mapping[str, Any], dataset: Dataset, url: str
) -> None:
    """Raise TrainingError where samples would come twice or never."""
    before = state["training"]
    named = ["num_samples", "classes", "seed", "shuffle", "weights", "normalize"]
    # the order of an epoch depends on it there
    if state["samples_done"] and hasattr(dataset, "epoch_order"):
        named.append("batch_size")
    for name in named:
        had = before.get(name)  # an older version did not write all of them
        if had != now[name]:
            raise TrainingError(
                f"resume: {url} was made with {_words(name, had)}, and this training has "
                f"{_words(name, now[name])}; to be resumed it needs the same data in the same "
                "order. Give those, or start from scratch without resume."
            )


def _words(name: str, value: Any) -> str:
    if name == "num_samples":
        return f"{value:,} samples"
    if name == "classes":
        return "no classes" if value is None else f"the classes {', '.join(value[:10])}"
    if name == "weights":
        return "no weights" if value is None else f"weights of their own ({value})"
    return f"{name}={value!r}"


def _check_optimizer(before: str, now: str) -> None:
    """Raise ValueError if an optimizer would be given what another kind has gathered."""
    if before != now:
        raise ValueError(f"the optimizer was {before}, and is {now} now")


def _load_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], kind: object
) -> None:
    """Load what the optimizer has gathered; of ours, with the settings that it has been made with.

    One of the user's may keep what it gathers among its settings: these are loaded too.
    """
    if isinstance(kind, str):
        saved, now = state["param_groups"], optimizer.state_dict()["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, now)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"groups of {sizes[0]} parameters, and now of {sizes[1]}")
        # The settings of now: the learning rate may be another one since.
        state = {**state, "param_groups": now}
    optimizer.load_state_dict(dict(state))
