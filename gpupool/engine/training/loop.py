"""The training loop. Runs on engines, also under plain `torchrun`.

Every rank walks through the same global batches and takes its share of each: `step.py` has one
step, `reports.py` what comes of it. All ranks know the same sums over the ranks, and decide from
them alike; so they end after the same step. Samples that cannot be read and may be skipped count
in no loss, and change no number of steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from gpupool.core.network import NetworkInfo
from gpupool.core.options.datasets import with_data
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import EVERY_S, Progress
from gpupool.core.wire.events import Event, ProgressEvent, StepEvent
from gpupool.data.reading import loader
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.shards import num_batches
from gpupool.engine import calls
from gpupool.engine.batches.form import form_of
from gpupool.engine.batches.share import Dataset, Share, num_samples
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.evaluation import Evaluation, each_share
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.numerics.batch_norm import plain_batch_norm
from gpupool.engine.numerics.ddp import share_statistics
from gpupool.engine.numerics.losses import make_loss
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.training.best_weights import BestWeights
from gpupool.engine.training.checkpoints import epoch_of
from gpupool.engine.training.dataset_statistics import fit_normalization
from gpupool.engine.training.early_stopping import loss_warning
from gpupool.engine.training.hooks import Hooks, make_event_log
from gpupool.engine.training.reports import Reporter
from gpupool.engine.training.run import FitResult, make_run, set_training
from gpupool.engine.training.start_event import start_event
from gpupool.engine.training.step import TrainingStep

_REPORT_EVERY = 10  # steps, where a second has more
_SAVING_S = 3.0  # for the checkpoint of a training that has to end at once


def fit(
    model: nn.Module,
    dataset: Dataset,
    loss: Any,
    options: TrainingOptions,
    *,
    world: World,
    validation: Dataset | None = None,
    network: NetworkInfo | None = None,
    num_classes: int = 0,
    emit: Callable[[Sequence[Event]], None] = lambda events: None,
    stop_requested: Callable[[], bool] = lambda: False,
    stops_at_once: Callable[[], bool] = lambda: False,
    rank_report: RankReport | None = None,
) -> FitResult:
    """Train `model` in place on every rank's device.

    Args:
        loss: see `make_loss`.
        options: how.
        network: what it will know: classes, and the normalization of its inputs.
        num_classes: a loss over classes asks for so many outputs.
        emit: receives the events of the first rank; the other ranks emit nothing.
        stop_requested: asked every 10 steps, and every second; true on any rank ends
            training on all, after the same step.
        stops_at_once: asked after an error: true if it is an interrupt, or an aborted collective,
            that ends training after the last complete step. Each rank ends alone then.
        rank_report: how this rank fares, which is measured only where there is one.

    Raises whatever a rank meets; the last complete step is in the checkpoints then, if there are.
    """
    options = with_data(options, dataset)
    report = rank_report or RankReport()
    training = _Training(
        model, dataset, loss, options, world, validation, emit, report, num_classes
    )
    training.know(network or NetworkInfo())
    training.run.reporter.requests["user"] = stop_requested
    training.emit_start()
    try:
        with loader.kept(options.epochs):  # workers end with it
            training.begin()
            training.run_epochs()
            training.validate_last()
            training.hooks.end()
            training.run.reporter.emit_waiting(training.run.step)
            training.keep_weights()
    except BaseException:
        with calls.uninterrupted():
            at_once = stops_at_once() and training.is_last_step_whole()
            training.save_last_step(at_once=at_once)
        if not at_once:
            raise
    training.hooks.close()
    # They refer to what holds the data set, in a circle: it shall not wait for the collector.
    training.run.reporter.requests.clear()
    return training.end()


class _Training:
    """State and stages of one `fit` call."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        loss: Any,
        options: TrainingOptions,
        world: World,
        validation: Dataset | None,
        emit: Callable[[Sequence[Event]], None],
        rank_report: RankReport,
        num_classes: int,
    ) -> None:
        self.dataset, self.validation, self.rank_report = dataset, validation, rank_report
        event_log = make_event_log(options, world, emit)
        self.loss = make_loss(
            loss, world.device, model=model, weight=options.weight, num_classes=num_classes
        )
        self.form = form_of(model, loss, options)
        reporter = Reporter(world, event_log)
        self.run = make_run(model, options, world, reporter)
        self.hooks = Hooks(self.run, event_log, dataset)
        self.metrics = make_metrics(
            options.metrics, world.device, scored=self.loss.scored, ignored=self.loss.ignored
        )
        self.steps_per_epoch = num_batches(num_samples(dataset), options.batch_size)
        self.train_step = TrainingStep(self.run, self.loss, self.steps_per_epoch, rank_report.timer)
        self.best = BestWeights(self.run, has_validation=validation is not None)
        self.has_begun = False
        self.is_resumed = False
        self.validation_s = math.inf  # how long the last one took; unknown of the first

    def know(self, network: NetworkInfo) -> None:
        """What the data show of the network before they are read."""
        run, scale = self.run, network.normalization
        run.classes, run.is_raw = network.classes, network.from_raw
        if scale is not None and run.options.normalize != "fit":
            run.normalization = Normalization(*scale)

    # ---- before the first step ------------------------------------------------------------------

    def emit_start(self) -> None:
        """The first event: what will be done."""
        run = self.run
        metrics = self.metrics.names if self.validation is not None else None
        run.reporter.emit(
            start_event(run.world, run.options, self.dataset, self.steps_per_epoch, metrics)
        )

    def begin(self) -> None:
        """Read the checkpoint to resume, if one is, and measure the inputs, if that is asked."""
        run = self.run
        if run.options.resume:
            run.reporter.emit(ProgressEvent("reading the checkpoint to resume from", 0, 0))
        self.is_resumed = self.hooks.begin()
        # A checkpoint holds what was measured: a resumed run does not measure again.
        if run.options.normalize == "fit" and run.normalization is None:
            run.reporter.emit(ProgressEvent("measuring the inputs, for normalize='fit'", 0, 0))
            run.normalization = fit_normalization(self.dataset, run.options, run.world, self.form)
        self.best.begin()
        first = "compiling, and the first step" if run.options.compile else "the first step"
        run.reporter.emit(ProgressEvent(first, 0, 0))
        self.has_begun = True
        if self.is_resumed:
            self._complete_last_step()

    def _complete_last_step(self) -> None:
        """What the interruption came before: a validation, or the end."""
        run = self.run
        if self._is_validation_due():
            self._validate()
        if run.options.max_steps is not None and run.step >= run.options.max_steps:
            run.stop("max_steps")
        if run.early_stopping.is_patience_over:
            run.stop("patience")

    # ---- epochs and steps -----------------------------------------------------------------------

    def run_epochs(self) -> None:
        """The epochs that are left, until something ends training."""
        run, options = self.run, self.run.options
        while not run.stopped_by and run.epoch <= options.epochs:
            run.reporter.begin_epoch(run.epoch, self.dataset, options, run.samples_done)
            self._set_training()
            if not self._run_epoch() or run.has_diverged:
                break  # this epoch has no end
            self._end_epoch()
        run.stop("epochs")
        self.rank_report.end()

    def _run_epoch(self) -> bool:
        """The steps of this epoch that are left; whether it is over then."""
        run, is_over = self.run, True
        self.rank_report.timer.begin_step()
        # Only the loop holds the iterator: so its threads end here, also if a traceback stays.
        for share in epoch_shares(
            self.dataset,
            run.options,
            run.world,
            run.epoch,
            run.samples_done,
            normalization=run.normalization,
            form=self.form,
        ):
            self._run_step(share)
            is_over = share.is_last
            if run.stopped_by:
                break
        return is_over

    def _run_step(self, share: Share) -> None:
        """One step and its report, then what is due after it: validate, save."""
        run, options = self.run, self.run.options
        if self.is_resumed:  # so that the same bits come out as without the interruption
            self.is_resumed = False
            self.train_step.prime_ddp(share)

        run.note_inputs(share)
        self.train_step.run(share)
        self.hooks.on_step()
        validates = self.validation is not None and _is_every(run.step, options.validate_every)
        self._report_step(share, validates=validates)

        if run.step == options.max_steps:
            run.stop("max_steps")
        # A user who stops does not wait for a validation, and diverged weights need none.
        if validates and run.stopped_by in ("", "max_steps"):
            self._validate()
            self._set_training()
        if not share.is_last and self.hooks.is_save_due() and self.best.check_finite():
            self.hooks.save_if_due()
        self.rank_report.timer.begin_step()

    def _report_step(self, share: Share, *, validates: bool) -> None:
        """Sum steps over the ranks: sent every 10 steps, received one step later.

        So nobody waits for the sums, unless something depends on the steps just made, or a second
        is over (`flush`). A loss that is no number, or a user's stop, ends training that much
        later.
        """
        run, options, reporter = self.run, self.run.options, self.run.reporter
        ends_training_or_epoch = share.is_last or run.step == options.max_steps
        if reporter.is_sending:
            self._check_stopping(reporter.receive())
        if (run.step - 1) % _REPORT_EVERY == 0:  # also where a second was over just then
            self.hooks.on_log()
        if validates or ends_training_or_epoch or run.stopped_by or self.hooks.is_save_due():
            self._check_stopping(reporter.flush())
            self.hooks.on_log()
        elif reporter.is_due:
            self._check_stopping(reporter.flush())
        elif run.step % _REPORT_EVERY == 0:
            reporter.send()
        self.rank_report.end_step(run.step)

    def _check_stopping(self, steps: Sequence[StepEvent]) -> None:
        """All ranks know the sums of these steps, and decide alike whether training ends."""
        run = self.run
        self.hooks.on_report()
        diverged = None if run.has_diverged else loss_warning(steps)
        if diverged is not None:
            run.reporter.emit(diverged)
            run.stopped_by = "diverged"  # whatever else ends it: these weights are not kept
        elif "user" in run.reporter.requested:
            run.stop("user")

    def _end_epoch(self) -> None:
        """What is due after an epoch."""
        run = self.run
        run.reporter.end_epoch()
        run.epoch, run.samples_done = run.epoch + 1, 0
        if self._validates_epochs and run.stopped_by in ("", "max_steps"):
            self._validate()
        if self.best.keep_if_finite():
            self.hooks.on_epoch()
            self.hooks.save_if_due(ends_epoch=True)

    # ---- validation -----------------------------------------------------------------------------

    def _validate(self) -> None:
        """Loss, accuracy and metrics over the validation set, and what follows from them."""
        run, validation = self.run, self.validation
        assert validation is not None
        # "local" batch norms have other statistics on each rank; those of rank 0 are kept.
        share_statistics(run.evaluated, run.world)
        run.reporter.begin_validation(run.step, validation, run.options)
        began = time.perf_counter()
        # at once if the last one was long: the first batch may be, too
        after_s = 0.0 if self.validation_s > EVERY_S else EVERY_S
        total, draw = num_samples(validation), run.reporter.emit_progress
        bar = Progress("validating", total, "samples", after_s=after_s, draw=draw)
        bar.tick()
        found = Evaluation(self.loss, run.world, run.options, self.metrics)

        def add(outputs: Any, share: Share) -> None:
            found.add(outputs, share)
            bar.advance(share.num_all, and_tick=True)

        each_share(
            run.evaluated,
            validation,
            run.world,
            run.options,
            add,
            run.normalization,
            self.form,
        )
        self.validation_s = time.perf_counter() - began
        values = self.metrics.compute(run.world)
        event = run.reporter.end_validation(run.step, epoch_of(run), found, values)
        run.reporter.emit_validation(self.best.add_validation(event))
        if run.early_stopping.is_patience_over:
            run.stop("patience")
        self.best.keep_if_finite()
        self.hooks.on_validation()

    def validate_last(self) -> None:
        """The last weights are validated too."""
        last, run = self.run.reporter.last_validation, self.run
        is_new = last is None or last.step != run.step
        if self.validation is not None and is_new and run.stopped_by in ("epochs", "max_steps"):
            self._validate()

    def _is_validation_due(self) -> bool:
        """Whether the last step, or epoch, of the run before has not been validated yet."""
        run, last = self.run, self.run.reporter.last_validation
        ends_epoch = self._validates_epochs and run.samples_done == 0
        is_due = ends_epoch or _is_every(run.step, run.options.validate_every)
        return self.validation is not None and is_due and (last is None or last.step != run.step)

    @property
    def _validates_epochs(self) -> bool:
        return self.validation is not None and self.run.options.validate_every == "epoch"

    def _set_training(self) -> None:
        set_training(self.run.model, frozen_norms=self.run.options.batch_norm == "frozen")

    # ---- the end --------------------------------------------------------------------------------

    def keep_weights(self) -> None:
        """Give the network the weights that are kept."""
        run = self.run
        share_statistics(run.evaluated, run.world)
        self.best.restore()
        plain_batch_norm(run.model).eval()

    def is_last_step_whole(self) -> bool:
        """Whether the network can be left as it is after the last step, and it is known of which.

        After an interrupt; where collectives have been aborted, the device may have continued with
        half a sum.
        """
        run = self.run
        if not self.has_begun or not run.is_step_complete:
            return False
        return not run.completed.why_spoilt_at_end()

    def save_last_step(self, *, at_once: bool) -> None:
        """After an error: save the last complete step; no other rank is asked anything.

        Nothing is saved if the optimizer was changing the weights.

        `at_once`: it was an interrupt, and the network keeps the weights of that step.
        """
        run = self.run
        if at_once or run.options.checkpoint is not None:  # else nobody sees the network again
            self.train_step.undo()
        self.hooks.on_error(_SAVING_S if at_once else None)
        if at_once:
            run.stopped_by = "user"
            self.best.restore()
            plain_batch_norm(run.model).eval()

    def end(self) -> FitResult:
        """Emit the last event; what training leaves."""
        run = self.run
        run.reporter.emit_end(run.step, run.stopped_by, run.kept_step)
        best = run.early_stopping.best
        return FitResult(
            run.model,
            run.stopped_by,
            run.step,
            run.kept_step,
            best,
            run.normalization,
            run.input_shape,
        )


def _is_every(step: int, every: str | int) -> bool:
    return isinstance(every, int) and step % every == 0
