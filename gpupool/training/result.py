"""What a training leaves behind, and several trainings side by side. Runs on the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import NONE, Table, duration, measured, number, percent, text_table
from gpupool.core.network import info_of
from gpupool.core.options.fields import written
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import StepEvent, ValidationEvent
from gpupool.pool.calls.output import RankOutput
from gpupool.training.doctor import Diagnosis, Shares, diagnose
from gpupool.training.history import TrainingHistory, after, best_of, figure, many, no_improvement
from gpupool.training.inference import WorstSamples, predict, worst_samples

if TYPE_CHECKING:
    from torch import nn

Rows = list[tuple[str, str]]
RESULTS = ("Ranks", "Steps", "Time", "Per second", "Loss", "Accuracy", "Best")  # that are compared


@dataclass(frozen=True)
class TrainingResult:
    """The trained network and how it got there.

    `model` is an ordinary module on the CPU, a new one: the module given to `train` is as it was.
    Its weights are the best ones or the last, as `options.keep` says. `options` are those that have
    held.
    """

    model: nn.Module
    history: TrainingHistory
    options: TrainingOptions
    outputs: Mapping[int, RankOutput] = field(default_factory=dict, repr=False)
    """What each rank that trained has printed."""
    transform: Any = field(default=None, repr=False)
    """What pictures go through in `predict`; None: only their size is changed."""
    validation: Any = field(default=None, repr=False)
    """The data set that was validated on; None without, in a copy that was pickled, and in another
    result of the same run."""
    loss: Any = field(default="auto", repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # A data set may be large, and a loss a function that cannot be pickled.
        return {**self.__dict__, "validation": None, "loss": "auto"}

    def text(self, rank: int) -> str:
        """What a rank that trained has printed."""
        return self.outputs[rank].text

    @property
    def stopped_by(self) -> str:
        """What ended it: "epochs" or "max_steps" (all was done), "user", "callback", "patience" or
        "diverged"."""
        return self.history.end.stopped_by if self.history.end else ""

    @property
    def best(self) -> ValidationEvent | None:
        """The best validation: its step, loss, accuracy and metrics; None without one."""
        return self.history.best

    @property
    def kept_step(self) -> int:
        """The step after which `model` has its weights from."""
        end = self.history.end
        if end is None:
            return 0
        # -1 stands for the last step: see `EndEvent`.
        return end.step if end.kept_step < 0 else end.kept_step

    @property
    def warnings(self) -> list[str]:
        """What there was to be known: divergence, checkpoints that failed; a sentence each."""
        return [*self.history.restarts, *(event.message for event in self.history.warnings)]

    @property
    def checkpoint(self) -> str | None:
        """URL of the newest checkpoint."""
        return self.history.newest.url if self.history.newest else None

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) of the training inputs, which `predict`, `evaluate` and `confusion` apply."""
        return info_of(self.model).normalization

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each output of `model`; () if the training data had no names."""
        return info_of(self.model).classes

    @property
    def skipped(self) -> dict[str, str]:
        """The URLs of samples that `on_error="skip"` has left out, with the reason of each, as
        "missing", "changed", "empty" or "damaged"."""
        return dict(self.history.reads.skipped)

    @property
    def throughput(self) -> float:
        """Training samples per second over all ranks."""
        return self.history.throughput

    def predict(self, x: Any, **options: Any) -> Any:
        """What `model` gives for `x`, as `gpupool.predict(result.model, x)`.

        Pictures that are no data set go through the transform of the validation data, if it has
        one, else they get the size of the training's pictures.
        """
        return predict(self.model, x, **{"transform": self.transform, **options})

    def worst(
        self, num: int = 16, dataset: Any = None, *, loss: Any = None, **options: Any
    ) -> WorstSamples:
        """The `num` samples of the validation data with the highest loss: what `model` found, what
        is true, and small pictures of images, as the data set gives them.

        Args:
            dataset: another data set than the validation data.
            loss: a name or module of torch, where that of the training is none.
            options: as those of `predict`.

        Raises TrainingError without a data set, for a stream, and for a loss that is none of torch.
        """
        dataset = self.validation if dataset is None else dataset
        if dataset is None:
            raise TrainingError(
                "result.worst() looks at the validation data, and this result has none: give a "
                "data set, as result.worst(16, dataset=data)."
            )
        # The samples are read as in the training, unless something else is asked for.
        names = ("collate", "inputs", "targets", "workers")
        reading = {name: getattr(self.options, name) for name in names} | options
        loss = self.loss if loss is None else loss
        return worst_samples(self.model, dataset, num, loss, **reading)

    @property
    def shares(self) -> Shares:
        """What each rank has spent its time on, as a table."""
        return Shares.of(self.history)

    def doctor(self) -> Diagnosis:
        """Why it was slow, and what to do next."""
        return diagnose(self.history)

    @property
    def profile(self) -> Table | None:
        """The operators that took longest, where steps were traced (the option `profile`): of each
        its own time in a step of rank 0, without what it calls."""
        event = self.history.profile
        if event is None:
            return None
        num, whole = event.num_steps, sum(c + d for _, _, c, d in event.operators) or 1.0
        rows = (
            (name, str(calls), f"{cpu / num:.3f}", f"{gpu / num:.3f}", percent((cpu + gpu) / whole))
            for name, calls, cpu, gpu in event.operators
        )
        columns = ("operator", "calls", "CPU ms", "GPU ms", "of all shown")
        return Table("The dearest operators", columns, tuple(rows))

    def plot(self) -> TrainingHistory:
        """The history, which IPython shows as the picture that the training has left."""
        return self.history

    @property
    def headline(self) -> str:
        """How it ended, in a line."""
        history = self.history
        num_epochs = history.start.num_epochs if history.start else 0
        why = {
            "epochs": f"{many(num_epochs, 'epoch')} completed",
            "max_steps": f"{many(len(history.steps), 'step')} completed",
            "user": "stopped by you",
            "callback": "stopped by a callback",
            "patience": no_improvement(history),
            "diverged": "training diverged",
        }.get(self.stopped_by, NONE)
        return f"{history.status}, {why}, in {duration(history.elapsed_s)}"

    def rows(self) -> Rows:
        history, best = self.history, self.best
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        unit = history.start.unit if history.start else "samples"
        events: dict[str, StepEvent | ValidationEvent | None] = {
            "Training": history.steps[-1] if history.steps else None,
            "Validation": history.validations[-1] if history.validations else None,
            f"Best, {after(best)}" if best else "": best,
        }
        rows = {
            "Model": f"{type(self.model).__name__}, {number(trained)} parameters trained",
            "Weights": f"after step {number(self.kept_step)}",
            "Speed": f"{number(self.throughput)} {unit}/s",
            **{label: in_words(measured_by(event)) for label, event in events.items() if event},
            "Options": ", ".join(f"{name}={value}" for name, value in history.options.items()),
            "Skipped": f"{number(history.reads.num_skipped)} {unit}" if self.skipped else "",
            "Checkpoint": self.checkpoint or "",
        }
        return [(label, value) for label, value in rows.items() if value]

    def __repr__(self) -> str:
        table = text_table([(f"  {label.lower()}", value) for label, value in self.rows()])
        warnings = (f"  warning: {sentence}" for sentence in self.warnings)
        return "\n".join([f"TrainingResult: {self.headline}", table, *warnings])


def measured_by(event: StepEvent | ValidationEvent) -> Rows:
    """Loss, metrics and accuracy, as (name, value); a metric of that name is the accuracy."""
    metrics = event.metrics if isinstance(event, ValidationEvent) else {}
    values = {name: measured(name, value) for name, value in metrics.items()}
    if event.accuracy is not None:
        values["accuracy"] = percent(event.accuracy)
    return [("loss", figure(event.loss)), *values.items()]


def in_words(values: Rows) -> str:
    return ", ".join(f"{name} {value}" for name, value in values)


def picture_transform(validation: Any) -> Any:
    """The transform of a datastore of images, or of that which it is a part of; None without."""
    while hasattr(validation, "dataset") and hasattr(validation, "indices"):
        validation = validation.dataset
    # Masks go through a transform together with their images.
    is_ours = hasattr(validation, "with_normalization") and not hasattr(validation, "mask_paths")
    return validation.transform if is_ours else None


# ---- side by side --------------------------------------------------------------------------------


class Comparison(Table):
    """A row for each training: its name, the options that differ, and what came out (`RESULTS`)."""


def compare(*trainings: Any, names: Sequence[str] | None = None) -> Comparison:
    """The options in which several trainings differ, and what came out, in a table.

    Loss and accuracy are means over the last epoch.

    Args:
        trainings: what `train` has given: results, or runs that have not ended; or their histories.
        names: one for each; numbers unless given.

    Raises TrainingError where there is none, or anything else, and for another number of names.
    """
    histories = [getattr(one, "history", one) for one in trainings]
    names = [str(n) for n in range(1, len(histories) + 1)] if names is None else names
    are_all = all(isinstance(one, TrainingHistory) for one in histories)
    if not histories or not are_all or len(names) != len(histories):
        raise TrainingError(
            "compare takes results of gpupool.train, and as many names: compare(result1, result2, "
            "names=['a', 'b'])."
        )
    usual, differ = TrainingOptions(), dict[str, list[str]]()
    for option in dict.fromkeys(name for one in histories for name in one.options):
        values = [one.options.get(option, written(usual, option)) for one in histories]
        if len(set(values)) > 1:
            differ[option] = values
    results = zip(*map(_results, histories), strict=True)
    rows = zip(names, *differ.values(), *results, strict=True)
    title = f"{len(histories)} trainings"
    return Comparison(title, ("", *differ, *RESULTS), tuple(rows))


def _results(history: TrainingHistory) -> tuple[str, ...]:
    start = history.start
    last = history.steps[-(start.steps_per_epoch if start else 0) or -1 :]
    accuracies = [one.accuracy for one in last if one.accuracy is not None]
    return (
        str(start.world_size) if start else NONE,
        number(len(history.steps)),
        duration(history.elapsed_s),
        f"{number(history.throughput)} {start.unit if start else 'samples'}",
        figure(fmean(one.loss for one in last) if last else None),
        percent(fmean(accuracies) if accuracies else None),
        best_of(history),
    )
