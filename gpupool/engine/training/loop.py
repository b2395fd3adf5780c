"""The training loop: `_Training.steps` is a training from its first step to its last.

Every rank walks through the same global batches and takes its share of each: `step.py` has one
step, `reports.py` what comes of it. All ranks know the same sums over the ranks, and decide from
them alike; so they end after the same step, unless an interrupt or an error ends each of them where
it is. Runs on engines, also under plain `torchrun`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gpupool.core.network import NetworkInfo
from gpupool.core.options.datasets import with_data
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import EVERY_S, Progress
from gpupool.core.wire.events import EndEvent, Event, ProgressEvent, StepEvent, WarningEvent
from gpupool.data.reading import loader
from gpupool.data.reading.shards import num_batches
from gpupool.engine import calls
from gpupool.engine.batches.form import form_of
from gpupool.engine.batches.shares import Dataset, Share, epoch_shares, fit_scaling, num_samples
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.evaluation import Evaluation, each_share
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.numerics.ddp import share_buffers
from gpupool.engine.numerics.losses import make_loss
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.probe.trace import Trace
from gpupool.engine.training.callbacks import Callbacks
from gpupool.engine.training.checkpoints import Saving, fail_together
from gpupool.engine.training.reports import REPORT_EVERY, EventLog, Reporter, start_event
from gpupool.engine.training.run import Run, make_run, set_training
from gpupool.engine.training.step import TrainingStep

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
) -> Run:
    """Train `model` in place on every rank's device.

    Args:
        loss: see `make_loss`.
        network: what it will know: classes, and the normalization of its inputs.
        num_classes: a loss over classes asks for so many outputs.
        emit: receives the events of the first rank; the other ranks emit nothing.
        stop_requested: asked every 10 steps, and once a second; true on any rank ends
            training on all, after the same step.
        stops_at_once: asked after an error: true if the user has stopped a training whose data do
            not come, by an interrupt and an abort of its collectives. Each rank ends alone then,
            after its last complete step, and well.
        rank_report: how this rank fares, which is measured only where there is one.

    Raises whatever a rank meets; the last complete step is in the checkpoints then, if there are,
    unless the error came while the optimizer changed the weights.
    """
    options = with_data(options, dataset)
    if options.keep == "auto":
        options = replace(options, keep="last" if validation is None else "best")
    report = rank_report or RankReport()
    training = _Training(
        model, dataset, loss, options, world, validation, emit, report, num_classes
    )
    run = training.run
    if network:  # of another class, where it has come to the rank by value
        run.network = NetworkInfo(**vars(network))
    if options.normalize == "fit":
        run.network = replace(run.network, normalization=None)
    run.reporter.requests["user"] = stop_requested
    metrics = training.metrics.names if validation is not None else None
    run.reporter.emit(start_event(world, options, dataset, training.steps_per_epoch, metrics))
    try:
        with loader.kept(options.epochs):  # workers end with it
            training.begin()
            training.steps()
            training.finish()
    except BaseException:
        with calls.uninterrupted():
            at_once = stops_at_once() and training.is_last_step_whole()
            training.save_last_step(at_once=at_once)
        if not at_once:
            raise
    run.reporter.emit_news()
    # They refer to what holds the data set, in a circle: it shall not wait for the collector.
    run.reporter.requests.clear()
    run.reporter.emit(EndEvent(run.stopped_by, run.step, run.reporter.elapsed_s, run.kept_step))
    return run


class _Training:
    """State and stages of one `fit` call; all ranks go through them alike."""

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
        event_log = EventLog(emit)
        self.loss = make_loss(
            loss, world.device, model=model, weight=options.weight, num_classes=num_classes
        )
        self.form = form_of(model, loss, options)
        self.metrics = make_metrics(
            options.metrics, scored=self.loss.scored, ignored=self.loss.ignored
        )
        self.run = run = make_run(model, options, world, Reporter(world, event_log))
        self.steps_per_epoch = num_batches(num_samples(dataset), options.batch_size)
        self.step = TrainingStep(run, self.loss, self.steps_per_epoch, rank_report.timer)
        self.saving = Saving(run, event_log, dataset)
        self.callbacks = Callbacks(run)
        self.trace = Trace(options.profile, world, self.run.reporter.emit)
        # All ranks learn of these with the next report, after the same step.
        run.reporter.requests["callback"] = lambda: self.callbacks.wants_stop
        run.reporter.requests["save"] = self.saving.is_time
        self.has_begun = False

    # ---- the training ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the checkpoint to resume, if one is, and measure the inputs, if that is asked."""
        run, options, emit = self.run, self.run.options, self.run.reporter.emit
        if options.resume:
            emit(ProgressEvent("reading the checkpoint to resume from", 0, 0))
        is_resumed = self.saving.begin()
        # The first rank alone looks whether it can write; all stop if it cannot.
        fail_together(run.world, self.trace.check)
        self.callbacks.call("start")
        # A checkpoint holds what was measured: a resumed run does not measure again.
        if options.normalize == "fit" and run.network.normalization is None:
            emit(ProgressEvent("measuring the inputs, for normalize='fit'", 0, 0))
            scaling = fit_scaling(self.dataset, options, run.world, self.form)
            run.network = replace(run.network, normalization=scaling)
        run.keep_finite()  # to go back to, should training diverge
        if said := self.step.buffers.trouble(num_samples(self.dataset)):
            emit(WarningEvent(said, run.step))
        what = "compiling, and the first step" if options.compile else "the first step"
        emit(ProgressEvent(what, 0, 0))
        self.has_begun = True
        if is_resumed:  # the interruption may have come before a validation, or the end
            ends_epoch = options.validate_every == "epoch" and run.samples_done == 0
            if (ends_epoch or self.is_validation_due()) and not self.is_validated():
                self.validate()
            if options.max_steps is not None and run.step >= options.max_steps:
                run.stop("max_steps")
            if run.is_patience_over:
                run.stop("patience")

    def steps(self) -> None:
        """The epochs and steps that are left, until something ends training."""
        run, options, reporter = self.run, self.run.options, self.run.reporter
        while not run.stopped_by and run.epoch <= options.epochs:
            reporter.begin_epoch(run.epoch, self.dataset, options)
            set_training(run.model, frozen_norms=options.batch_norm == "frozen")
            ends_epoch = True  # also where a resumed epoch has no steps left
            for share in self.shares():
                self.step.run(share)  # forward, backward, mean over the ranks, optimizer
                self.trace.stepped()
                self.callbacks.call("step")  # a wish to stop comes with the next report
                self.rank_report.timer.end("callbacks")

                ends_epoch = share.is_last
                validates = self.is_validation_due()
                is_over = ends_epoch or run.step == options.max_steps
                saves = self.report(is_needed=validates or is_over)  # may stop the training
                self.rank_report.end_step(run.step)
                if run.step == options.max_steps:
                    run.stop("max_steps")
                # Whoever stops does not wait for it, and diverged weights need none.
                if validates and run.stopped_by in ("", "max_steps"):
                    self.validate()
                    set_training(run.model, frozen_norms=options.batch_norm == "frozen")
                if saves and not ends_epoch:  # else it is saved as the beginning of the next one
                    self.save()
                if run.stopped_by:
                    break
            if not ends_epoch or run.has_diverged:
                break  # this epoch has no end

            run.epoch, run.samples_done = run.epoch + 1, 0
            validates = self.validation is not None and options.validate_every == "epoch"
            if validates and run.stopped_by in ("", "max_steps"):
                self.validate()
            if run.check_finite(keeps=True):
                self.callbacks.call("epoch")
                if self.saving.is_due(ends_epoch=True):
                    self.save()
        run.stop("epochs")  # unless something else has: the first reason stays

    def finish(self) -> None:
        """After the last step: what is validated and saved then, and which weights are left."""
        run = self.run
        if run.stopped_by in ("epochs", "max_steps") and not self.is_validated():
            self.validate()
        with self.rank_report.timer.beside("saving"):
            self.saving.end()
        self.rank_report.end()
        if run.options.profile is not None:
            self.trace.write()
            for said in filter(None, run.world.gather(self.trace.problem)):
                run.reporter.emit(WarningEvent(said, run.step))
        self.callbacks.call("end")
        share_buffers(run.evaluated.buffers(), run.world)
        run.leave_weights()

    # ---- its parts ------------------------------------------------------------------------------

    def shares(self) -> Iterator[Share]:
        """This rank's shares of the batches of this epoch that are left."""
        run, timer = self.run, self.rank_report.timer
        # Only the loop holds the iterator: so its threads end here, also if a traceback stays.
        shares = epoch_shares(
            self.dataset,
            run.options,
            run.world,
            run.epoch,
            run.samples_done,
            normalization=run.network.normalization,
            form=self.form,
        )
        timer.begin_step()
        for share in shares:
            timer.end("data")
            run.note_inputs(share)
            yield share
            timer.begin_step()

    def report(self, *, is_needed: bool) -> bool:
        """Sum steps over the ranks: begun every 10 steps, finished one step later.

        So nobody waits for the sums, unless something depends on the steps just made (`is_needed`),
        or about a second is over. Returns whether a checkpoint is due.
        """
        run, reporter = self.run, self.run.reporter
        if reporter.sums.is_begun:
            self.decide(reporter.finish())
        if (run.step - 1) % REPORT_EVERY == 0:  # also where a second was over just then
            self.heed_callbacks()
        saves = self.saving.is_due(ends_epoch=False)
        if is_needed or saves or run.stopped_by:
            self.decide(reporter.flush())
            self.heed_callbacks()
        elif reporter.sums.is_late:  # about a second is over, on every rank alike
            self.decide(reporter.flush())
        elif run.step % REPORT_EVERY == 0:
            reporter.begin()
        return saves

    def decide(self, steps: Sequence[StepEvent]) -> None:
        """All ranks know the sums of these steps, and decide alike whether training ends."""
        run = self.run
        bad = next((one.step for one in steps if not math.isfinite(one.loss)), None)
        if bad is not None and not run.has_diverged:
            run.diverge("Loss", bad)
        elif "user" in run.reporter.requested:
            run.stop("user")

    def heed_callbacks(self) -> None:
        """Show callbacks the newest report, and stop if one of them wishes it: after steps that
        options decide, and no clock, as what callbacks see can change the weights."""
        self.run.reporter.show_last_step()
        if "callback" in self.run.reporter.requested:
            self.run.stop("callback")

    def validate(self) -> None:
        """Loss, accuracy and metrics over the validation set, and what follows from them."""
        run, data, reporter = self.run, self.validation, self.run.reporter
        model, scaling = run.evaluated, run.network.normalization
        assert data is not None
        with self.rank_report.timer.beside("validating"):
            # "local" batch norms have other statistics on each rank; all take those of rank 0.
            share_buffers(model.buffers(), run.world)
            found = Evaluation(self.loss, run.world, run.options, self.metrics)
            num, draw = num_samples(data), reporter.emit_progress
            bar = Progress("validating", num, "samples", after_s=EVERY_S, draw=draw)
            each_share(model, data, run.world, run.options, found.add, bar, scaling, self.form)
            event = reporter.validated(run.step, run.complete_epoch, found, data, run.options)
            reporter.last_validation = run.add_validation(event)
            reporter.emit(reporter.last_validation)
            if run.is_patience_over:
                run.stop("patience")
            run.check_finite(keeps=True)
            self.callbacks.call("validation")

    def is_validation_due(self) -> bool:
        every = self.run.options.validate_every
        return self.validation is not None and isinstance(every, int) and self.run.step % every == 0

    def is_validated(self) -> bool:
        last = self.run.reporter.last_validation
        return self.validation is None or (last is not None and last.step == self.run.step)

    def save(self) -> None:
        """Begin to write a checkpoint, between two steps, with all that belongs to the last one."""
        with self.rank_report.timer.beside("saving"):
            if self.run.check_finite():
                self.callbacks.call("checkpoint")  # before: what a callback sets now is in it
                self.saving.save()

    def is_last_step_whole(self) -> bool:
        """Whether the network can be left as it is, and it is known after which step that is."""
        run = self.run
        # Waits for the device: after an abort it may have continued with half a sum.
        return self.has_begun and run.is_step_complete and not run.completed.why_spoilt_at_end()

    def save_last_step(self, *, at_once: bool) -> None:
        """After an error; no other rank is asked anything.

        `at_once`: the user has stopped it, and the network is left as at any other stop. A
        checkpoint that takes long is not waited for then.
        """
        run = self.run
        if at_once or run.options.checkpoint is not None:  # else nobody needs the step before
            self.step.before.restore()
        self.trace.drop()
        run.reporter.emit(*run.reporter.unreported())  # a checkpoint has them too
        self.saving.end(_SAVING_S if at_once else None)  # it writes what is not written yet
        if at_once:
            run.stopped_by = "user"
            run.leave_weights()
