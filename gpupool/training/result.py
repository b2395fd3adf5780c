"""What training leaves behind. Runs on the client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import NONE, duration, measured, number, percent
from gpupool.core.network import info_of
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import StartEvent, ValidationEvent
from gpupool.core.wire.replies import TrainReply
from gpupool.pool.calls.output import RankOutput
from gpupool.training.history import TrainingHistory
from gpupool.training.phrases import after, backend, ending, figure, global_batch, hardware
from gpupool.training.predict import Predictions, predicted
from gpupool.training.worst import WorstSamples, worst_samples

if TYPE_CHECKING:
    from torch import Tensor, nn


Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Summary:
    """What came of a training, ready to be shown.

    `facts` are pairs (label, value). `values` is a table with the header `columns`: the name of the
    row, then loss, accuracy and metrics of the last training step, the last and the best
    validation. `warnings` are sentences.
    """

    headline: str
    facts: Rows
    columns: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"TrainingResult: {self.headline}"]
        lines += [f"  {label.lower():<12}{value}" for label, value in self.facts]
        if self.values:
            rows = [("", *(name.lower() for name in self.columns[1:])), *self.values]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for first, *rest in rows:
                cells = [cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True)]
                name = first.lower().ljust(max(12, widths[0] + 2))
                lines.append(f"  {name}{'  '.join(cells)}".rstrip())
        lines += [f"  warning: {sentence}" for sentence in self.warnings]
        return "\n".join(lines)


@dataclass(frozen=True)
class TrainingPlot:
    """The curves of a training, which IPython shows as a picture, or as text in a terminal."""

    history: TrainingHistory = field(repr=False)

    def __repr__(self) -> str:
        return f"TrainingPlot({self.history.line()})"


@dataclass(frozen=True)
class TrainingResult:
    """The trained network and how it got there.

    `model` is an ordinary module on the CPU, a new one: the module given to `train` is as it was.
    Its weights are the best ones or the last, as `options.keep` says. `options` are those that have
    held: `scale` is carried out.
    """

    model: nn.Module
    history: TrainingHistory
    options: TrainingOptions
    found: TrainReply = field(default_factory=TrainReply, repr=False)
    """What the ranks report beside the events."""
    outputs: Mapping[int, RankOutput] = field(default_factory=dict, repr=False)
    """What each rank that trained has printed."""
    transform: Any = field(default=None, repr=False)
    """What pictures go through in `predict`; None where only their size is changed."""
    validation: Any = field(default=None, repr=False)
    """The data set that was validated on; None without, and in a copy that was pickled."""
    loss: Any = field(default="auto", repr=False)
    """What was minimized."""

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
        """(mean, std) of the training inputs, by `with_normalization` or normalize="fit".

        `predict`, `evaluate` and `confusion` apply it, as `model` knows it too.
        """
        return info_of(self.model).normalization

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each output of `model`; () if the training data had no names."""
        return info_of(self.model).classes

    @property
    def skipped(self) -> dict[str, str]:
        """The URLs of samples that `on_error="skip"` has left out, and what is wrong with each.

        They are counted nowhere: "missing", "changed", "empty", "damaged" or another
        reason of a `SampleError`.
        """
        return dict(self.history.reads.skipped)

    @overload
    def predict(self, x: Any, *, names: Literal[False] = ..., **options: Any) -> Tensor | Any: ...
    @overload
    def predict(self, x: Any, *, names: Literal[True], **options: Any) -> Predictions: ...
    def predict(self, x: Any, *, names: bool = False, **options: Any) -> Any:
        """What `model` gives for `x`, as `gpupool.predict(result.model, x)`.

        Pictures that are no data set go through the transform of the validation data, or through
        that of the training data if it has no random part; without either, they get the size of the
        training's pictures. Then they are normalized as in training.
        """
        return predicted(self.model, x, self.transform, names, **options)

    def worst(
        self, num: int = 16, dataset: Any = None, *, loss: Any = None, **options: Any
    ) -> WorstSamples:
        """The `num` samples of the validation data with the highest loss: what `model` found, what
        is true, and small pictures of images, as the data set gives them.

        Args:
            dataset: another data set than the validation data.
            loss: a name or module of torch, where that of the training is none.
            options: as those of `evaluate`: `batch_size`, `precision`, `pool` and how to read.

        Raises:
            TrainingError: there was no validation and no data set is given; it is a stream; the
                loss is none of torch.
            OptionsError: a number or an option is wrong.
            SpmdError: a rank failed.
        """
        dataset = self.validation if dataset is None else dataset
        if dataset is None:
            raise TrainingError(
                "result.worst() looks at the validation data, and this training had none: give a "
                "data set, as result.worst(16, dataset=data)."
            )
        # The samples are read as in the training, unless something else is asked for.
        usual = TrainingOptions()
        for name in ("collate", "inputs", "targets", "workers"):
            value = getattr(self.options, name)
            if value != getattr(usual, name):
                options.setdefault(name, value)
        loss = self.loss if loss is None else loss
        return worst_samples(self.model, dataset, num, loss, **options)

    def plot(self) -> TrainingPlot:
        """Loss and accuracy over the steps: the picture that the training has left."""
        return TrainingPlot(self.history)

    @property
    def throughput(self) -> float:
        """Training samples per second over all ranks."""
        return self.history.throughput

    def summary(self) -> Summary:
        """What was trained, on what, how long, and what came of it; `print` makes text of it."""
        return _summarize(self)

    def __repr__(self) -> str:
        return str(self.summary())


def _summarize(result: TrainingResult) -> Summary:
    """The outcome of a training."""
    history = result.history
    columns, values = _values(result)
    start = history.start
    return Summary(
        headline=_headline(result),
        facts=tuple(_facts(result, start)) if start else (("Model", _model(result.model)),),
        columns=columns,
        values=values,
        warnings=tuple(result.warnings),
    )


def _headline(result: TrainingResult) -> str:
    history = result.history
    why = {"user": "by you", "callback": "by a callback"}.get(result.stopped_by, ending(history))
    return f"{history.status}, {why}, in {duration(history.elapsed_s)}"


def _facts(result: TrainingResult, start: StartEvent) -> list[tuple[str, str]]:
    history = result.history
    num_steps = len(history.steps)
    rows = [
        ("Model", _model(result.model)),
        ("Weights", _weights(result)),
        ("Data", _data(start, history)),
        ("Steps", f"{number(num_steps)}, batch {global_batch(start.batch_size, start.world_size)}"),
        ("Hardware", ", ".join(filter(None, [hardware(start), backend(start)]))),
        ("Time", _time(result, start)),
    ]
    if history.options:
        rows.append(("Options", ", ".join(f"{n}={value}" for n, value in history.options.items())))
    if result.skipped:
        rows.append(("Skipped", f"{number(history.reads.num_skipped)} {start.unit}"))
    if history.resumed is not None:
        rows.append(("Resumed", after(history.resumed)))
    if result.checkpoint:
        rows.append(("Checkpoint", result.checkpoint))
    return rows


def _model(model: Any) -> str:
    """Its class, and how much there is to train."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
    frozen = "" if total == trained else f", {number(trained)} of them trained"
    return f"{type(model).__name__}, {number(total)} parameters{frozen}"


def _weights(result: TrainingResult) -> str:
    best = result.best
    # The last step may be the best one, too: only the options say which was wanted.
    is_best = best is not None and best.step == result.kept_step
    kind = "the best ones" if is_best and result.options.keep != "last" else "the last ones"
    if result.stopped_by == "diverged" and kind == "the last ones":
        kind = "the last good ones"
    return f"{kind}, after step {number(result.kept_step)}"


def _data(start: StartEvent, history: TrainingHistory) -> str:
    if not start.num_samples:
        return f"a stream of {start.unit}"
    epochs = "1 epoch" if start.num_epochs == 1 else f"{start.num_epochs} epochs"
    by = f", read by {history.reads.read_by}" if history.reads.read_by else ""
    return f"{number(start.num_samples)} {start.unit}, {epochs} planned{by}"


def _time(result: TrainingResult, start: StartEvent) -> str:
    summary = f"{duration(result.history.elapsed_s)}, {number(result.throughput)} {start.unit}/s"
    if not start.started_at:
        return summary
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.started_at))
    return f"{summary}, started {began}"


def _values(result: TrainingResult) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The header and the rows of the table; without any step there is none."""
    history, best = result.history, result.best
    if not history.steps:
        return (), ()
    last = history.steps[-1]
    validations = history.validations[-1:]
    has_accuracy = last.accuracy is not None
    # Also a metric of that name has one column.
    known = {"accuracy"} if has_accuracy else set()
    metrics = [name for one in validations for name in one.metrics if name not in known]
    columns = ["", "Loss", *(["Accuracy"] if has_accuracy else []), *metrics]
    accuracy = [percent(last.accuracy)] if has_accuracy else []
    rows = [("Training", figure(last.loss), *accuracy, *[NONE] * len(metrics))]
    shown = [("Validation", one) for one in validations]
    if best is not None:
        shown.append((f"Best ({after(best)})", best))
    rows += [_row(name, event, metrics, has_accuracy) for name, event in shown]
    return tuple(columns), tuple(rows)


def _row(
    name: str, event: ValidationEvent, metrics: list[str], has_accuracy: bool
) -> tuple[str, ...]:
    accuracy = [percent(event.accuracy)] if has_accuracy else []
    shown = [measured(metric, event.metrics.get(metric)) for metric in metrics]
    return name, figure(event.loss), *accuracy, *shown
