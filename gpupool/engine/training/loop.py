"""The training loop, top to bottom. Runs on engines; under plain `torchrun` too; knows only torch.

Every rank walks through the same global batches and computes its share of each. The loss is
weighted so that the gradients are those of one process with the whole batch, whatever the shares
(`step.py`). Samples that cannot be read and may be skipped count nowhere, and change no number of
steps. All ranks know the same sums, judge them alike, and so end after the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gpupool.core.options.schedule import lr_factor
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import EVERY_S, Progress
from gpupool.core.wire.events import Event, ProgressEvent, StepEvent
from gpupool.data.reading import shards
from gpupool.engine import calls
from gpupool.engine.batches.share import Dataset, Share, num_samples
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.evaluation import evaluate
from gpupool.engine.metrics.metrics import Metrics, make_metrics
from gpupool.engine.numerics.batch_norm import plain_batch_norm
from gpupool.engine.numerics.ddp import share_statistics
from gpupool.engine.numerics.losses import Loss, make_loss
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.training.best_weights import Keeping
from gpupool.engine.training.dataset_statistics import fit_normalization, recompute_statistics
from gpupool.engine.training.hooks import Companions, make_told
from gpupool.engine.training.reports import Ledger
from gpupool.engine.training.run import FitResult, Run
from gpupool.engine.training.run_setup import make_run, set_training
from gpupool.engine.training.run_state import epoch_of
from gpupool.engine.training.start_event import start_event
from gpupool.engine.training.step import Update

_SAVING_S = 3.0  # for the checkpoint of a training that is to end at once


def fit(
    model: nn.Module,
    dataset: Dataset,
    loss: Any,
    options: TrainingOptions,
    *,
    world: World,
    validation: Dataset | None = None,
    emit: Callable[[Sequence[Event]], None] = lambda events: None,
    stop_requested: Callable[[], bool] = lambda: False,
    stops_at_once: Callable[[], bool] = lambda: False,
    report: RankReport | None = None,
) -> FitResult:
    """Train `model` in place on every rank's device.

    Args:
        loss: see `make_loss`.
        options: resolved ones, where `scale` asks for more than they say.
        emit: is given the events of the first rank; the other ranks emit nothing.
        stop_requested: asked every `log_every` steps; true on any rank ends training on all,
            after the same step.
        stops_at_once: asked after an error: true if it is an interrupt, or an aborted collective,
            that ends training after the last complete step. Each rank does so by itself.
        report: how this rank fares, which is measured only where there is one.

    Raises whatever a rank meets; the last complete step is in the checkpoints then, if there are.
    """
    told = make_told(options, world, emit)
    compute_loss = make_loss(loss, world.device)
    ledger = Ledger(world, told, num_terms=compute_loss.num_terms)
    run = make_run(model, options, world, ledger)
    companions = Companions(run, told, dataset)
    report = report or RankReport()
    ledger.wishes = {"user": stop_requested, **companions.wishes}
    training = _Training(
        run=run,
        dataset=dataset,
        validation=validation,
        loss=compute_loss,
        metrics=make_metrics(
            options.metrics, world.device, judged=compute_loss.judged, ignored=compute_loss.ignored
        ),
        steps_per_epoch=shards.num_batches(num_samples(dataset), options.batch_size),
        companions=companions,
        update=Update(run, compute_loss, report),
        keeping=Keeping(run, has_validation=validation is not None),
        report=report,
    )
    ledger.tell(
        start_event(
            world,
            options,
            dataset,
            training.steps_per_epoch,
            training.metrics.names if validation is not None else None,
        )
    )
    try:
        training.begin()
        training.run_epochs()
        training.validate_last()
        companions.end()
        training.finish()
    except BaseException:
        at_once = stops_at_once() and training.has_begun and run.is_whole
        with calls.uninterrupted():
            training.update.undo()
            companions.failed(_SAVING_S if at_once else None)
            if at_once:
                training.end_here()
        if not at_once:
            raise
    companions.close()
    ledger.end(run.step, run.stopped_by, run.kept_step)
    return FitResult(
        model, run.stopped_by, run.step, run.kept_step, run.judge.best, run.normalization
    )


@dataclass
class _Training:
    """What `fit` is about, and the stages it goes through."""

    run: Run
    dataset: Dataset
    validation: Dataset | None
    loss: Loss
    metrics: Metrics
    steps_per_epoch: int
    companions: Companions
    update: Update
    keeping: Keeping
    report: RankReport
    has_begun: bool = False
    is_resumed: bool = False
    validation_s: float = math.inf  # how long the last one took; of the first nobody knows

    def begin(self) -> None:
        """What comes before the first step."""
        run = self.run
        if run.options.resume:
            run.ledger.tell(ProgressEvent("reading the checkpoint to go on from", 0, 0))
        self.is_resumed = self.companions.begin()
        if run.options.normalize == "fit" and run.normalization is None:
            run.ledger.tell(ProgressEvent("measuring the inputs, for normalize='fit'", 0, 0))
            run.normalization = fit_normalization(self.dataset, run.options, run.world)
        self.keeping.begin()
        first = "compiling, and the first step" if run.options.compile else "the first step"
        run.ledger.tell(ProgressEvent(first, 0, 0))
        self.has_begun = True
        if not self.is_resumed:
            return
        if self._is_validation_due():  # the interruption came before it
            self._validate()
        if run.options.max_steps is not None and run.step >= run.options.max_steps:
            run.stopped_by = run.stopped_by or "max_steps"
        if run.judge.has_enough:
            run.stopped_by = run.stopped_by or "patience"

    def validate_last(self) -> None:
        """The last weights are validated too."""
        last, run = self.run.ledger.last_validation, self.run
        is_new = last is None or last.step != run.step
        if self.validation is not None and is_new and run.stopped_by in ("epochs", "max_steps"):
            self._validate()

    def run_epochs(self) -> None:
        """The epochs that are left, until something ends training."""
        run, options = self.run, self.run.options
        while not run.stopped_by and run.epoch <= options.epochs:
            run.ledger.begin_epoch(run.epoch, self.dataset, options, run.samples_done)
            self._set_training()
            is_over = True
            self.report.begin()
            # Held by nothing but the loop: so its threads end with it, also where a traceback stays
            for share in epoch_shares(
                self.dataset,
                options,
                run.world,
                run.epoch,
                run.samples_done,
                normalization=run.normalization,
            ):
                self._step(share)
                is_over = share.is_last
                if run.stopped_by:
                    break
            if not is_over or run.has_diverged:
                break
            self._end_epoch()
        run.stopped_by = run.stopped_by or "epochs"
        self.report.end()

    def _end_epoch(self) -> None:
        """What is due after an epoch."""
        run = self.run
        run.ledger.end_epoch()
        run.epoch, run.samples_done = run.epoch + 1, 0
        if self._validates_epochs and run.stopped_by in ("", "max_steps"):
            self._validate()
        if self.keeping.look():
            self.companions.epoch_ended()
            self.companions.save_if_due(ends_epoch=True)

    def _step(self, share: Share) -> None:
        """One step, its report, and what is due after it."""
        run, options = self.run, self.run.options
        if self.is_resumed:
            self.is_resumed = False
            self.update.warm_up(share)
        lr = options.lr * lr_factor(options, run.step + 1, self.steps_per_epoch, run.epoch)
        measured = self.update.step(share, lr)
        self.report.worked()
        run.step += 1
        run.samples_done += share.num_all
        # ---- its report: kept on the device, summed over ranks every few steps, read a step later
        run.ledger.add(run.step, run.epoch, lr, measured, share)
        run.end_change()
        self.companions.stepped()
        is_last = share.is_last or run.step == options.max_steps
        validates = self.validation is not None and _is_every(run.step, options.validate_every)
        if run.ledger.is_sending:  # since the step before
            self._judge(run.ledger.receive())
        if validates or is_last or run.stopped_by or self.companions.is_due():
            self._judge(run.ledger.flush())
        elif run.step % options.log_every == 0:
            run.ledger.send()
        self.report.stepped(run.step)
        if run.step == options.max_steps:
            run.stopped_by = run.stopped_by or "max_steps"
        if validates and run.stopped_by in ("", "max_steps"):
            self._validate()
            self._set_training()
        if not share.is_last and self.companions.is_due() and self.keeping.is_good():
            self.companions.save_if_due()
        self.report.begin()

    def _judge(self, steps: Sequence[StepEvent]) -> None:
        """All ranks know what the last steps gave, and what follows from it."""
        run = self.run
        self.companions.flushed()
        warnings = run.judge.stepped(steps, run.ledger.num_classes)
        run.ledger.tell(*warnings)
        if not run.judge.is_finite and run.options.on_divergence == "stop":
            run.stopped_by = "diverged"
        elif "user" in run.ledger.agreed:
            run.stopped_by = run.stopped_by or "user"

    def _validate(self) -> None:
        """Loss, accuracy and metrics over the validation set, and what follows from them."""
        run, validation = self.run, self.validation
        assert validation is not None
        share_statistics(run.evaluated, run.world)
        run.ledger.begin_validation(run.step, validation, run.options)
        began = time.perf_counter()
        # at once if the last one was long: the first batch may be, too
        after_s = 0.0 if self.validation_s > EVERY_S else EVERY_S
        total, tell = num_samples(validation), run.ledger.tell_aside
        bar = Progress("validating", total, "samples", after_s=after_s, draw=tell)
        bar.tick()
        found = evaluate(
            run.evaluated,
            validation,
            self.loss,
            run.world,
            run.options,
            self.metrics,
            run.normalization,
            on_share=lambda share: bar.advance(share.num_all, and_tick=True),
        )
        self.validation_s = time.perf_counter() - began
        values = self.metrics.compute(run.world)
        event = run.ledger.end_validation(run.step, epoch_of(run), found, values)
        run.ledger.validated(self.keeping.validated(event))
        if run.judge.has_enough:
            run.stopped_by = run.stopped_by or "patience"
        self.keeping.look()
        self.companions.validated()

    def finish(self) -> None:
        """Give the network the weights that are kept, and the statistics that are asked for."""
        run, options = self.run, self.run.options
        share_statistics(run.evaluated, run.world)
        self.keeping.restore()
        if options.bn_statistics == "population":
            recompute_statistics(run.model, self.dataset, options, run.world, run.normalization)
        plain_batch_norm(run.model).eval()

    def end_here(self) -> None:
        """As `finish`, after the last complete step, without any other rank."""
        run = self.run
        run.stopped_by = "user"
        run.ledger.tell(*run.ledger.unreported())
        self.keeping.restore()
        plain_batch_norm(run.model).eval()

    def _is_validation_due(self) -> bool:
        """Whether the last step, or epoch, that was made before has not been validated yet."""
        run, last = self.run, self.run.ledger.last_validation
        ends_epoch = self._validates_epochs and run.samples_done == 0
        is_due = ends_epoch or _is_every(run.step, run.options.validate_every)
        return self.validation is not None and is_due and (last is None or last.step != run.step)

    @property
    def _validates_epochs(self) -> bool:
        return self.validation is not None and self.run.options.validate_every == "epoch"

    def _set_training(self) -> None:
        set_training(self.run.model, frozen_norms=self.run.options.batch_norm == "frozen")


def _is_every(step: int, every: str | int) -> bool:
    return isinstance(every, int) and step % every == 0
