"""What is called at the events of a training: checkpoints, callbacks, TensorBoard, a trace.

Runs on engines. The loop calls one method at each event; everything else about them is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import Event, WarningEvent
from gpupool.engine.batches.share import Dataset
from gpupool.engine.group.forming import World
from gpupool.engine.probe.trace import Trace
from gpupool.engine.training.callbacks import Callbacks
from gpupool.engine.training.checkpoints import Saving, fail_together
from gpupool.engine.training.event_log import EventLog
from gpupool.engine.training.run import Run
from gpupool.engine.training.tensorboard import Board


def make_event_log(
    options: TrainingOptions, world: World, emit: Callable[[Sequence[Event]], None]
) -> EventLog:
    """What receives the events of a training: for `emit`, for checkpoints, and for TensorBoard.

    Raises TrainingError, on every rank, if TensorBoard's file cannot be written.
    """
    url = options.tensorboard if world.rank == 0 else None
    return EventLog(emit, fail_together(world, lambda: Board(url) if url else None))


class Hooks:
    """Those of one training. All methods are called on every rank alike, except `on_error`.

    Whatever ends training early is put in `run.stopped_by`.
    """

    def __init__(self, run: Run, event_log: EventLog, dataset: Dataset) -> None:
        self._run, self._event_log = run, event_log
        self._saving = Saving(run, event_log, dataset)
        self._callbacks = Callbacks(run)
        self._trace = Trace(run.options.profile, run.world)
        # All ranks learn of these with the next report, after the same step.
        run.reporter.requests["callback"] = lambda: self._callbacks.wants_stop
        run.reporter.requests["save"] = self._saving.is_time

    def begin(self) -> bool:
        """Resume from a checkpoint if that is asked; returns whether `run` is another now.

        Raises TrainingError, on every rank: nothing is there, or nothing can be written there.
        """
        resumed = self._saving.begin()
        # The first rank alone looks whether it can write; all stop if it cannot.
        fail_together(self._run.world, self._trace.check)
        self._stop_if(self._callbacks.call("start"))
        return resumed

    def on_step(self) -> None:
        """A step is complete."""
        self._trace.stepped()
        self._callbacks.call("step")
        self._warn_of_board()

    def on_report(self) -> None:
        """Sums over the ranks were received: all ranks know what each of them requests."""
        self._saving.report_news()

    def on_log(self) -> None:
        """As `on_report`, after steps that the options decide, and no clock.

        What callbacks read and wish can change the weights, so it must not depend on time.
        """
        self._run.reporter.show_last_step()
        self._stop_if("callback" in self._run.reporter.requested)

    def on_validation(self) -> None:
        """There was a validation."""
        self._stop_if(self._callbacks.call("validation"))

    def on_epoch(self) -> None:
        """An epoch is over, with what belongs to it, and `run` at the beginning of the next."""
        self._stop_if(self._callbacks.call("epoch"))

    def is_save_due(self) -> bool:
        """Whether this step, which ends no epoch, is to be saved."""
        return self._saving.is_due(ends_epoch=False)

    def save_if_due(self, *, ends_epoch: bool = False) -> None:
        """Between two steps, after what belongs to the last one."""
        if self._saving.is_due(ends_epoch=ends_epoch):
            if self._run.reporter.unreported():  # a checkpoint has all events of its steps
                self._run.reporter.flush()
                self.on_report()
                self.on_log()
            # Before it is made: what a callback sets now is in it.
            self._stop_if(self._callbacks.call("checkpoint"))
            self._saving.save()

    def on_error(self, within_s: float | None = None) -> None:
        """Training ends with an error, and `run` is as it was after its last complete step.

        On the ranks that this happens on; no other one is asked anything. A checkpoint that takes
        longer than `within_s` is not waited for.
        """
        self._trace.drop()
        self._close_board()
        self._run.reporter.emit(*self._run.reporter.unreported())  # a checkpoint has them too
        self._saving.end(within_s)

    def end(self) -> None:
        """Training is over, but for the last event."""
        self._saving.end()
        if self._run.options.profile is not None:
            # Several ranks may say the same sentence: once is enough.
            self._warn("profile", list(dict.fromkeys(self._run.world.gather(self._trace.end()))))
        self._callbacks.call("end")

    def close(self) -> None:
        """Before the last event, which neither checkpoints nor TensorBoard keep."""
        self._close_board()
        self._warn_of_board()

    def _stop_if(self, wanted: bool) -> None:
        if wanted:
            self._run.stop("callback")

    def _warn(self, about: str, sentences: Sequence[str]) -> None:
        for sentence in filter(None, sentences):
            self._run.reporter.emit(WarningEvent(about, sentence, self._run.step))

    def _warn_of_board(self) -> None:
        if self._event_log.board is not None:
            failures = self._event_log.board.failures
            self._warn("tensorboard", [failures.pop(0) for _ in range(len(failures))])

    def _close_board(self) -> None:
        if self._event_log.board is not None:
            self._event_log.board.close()
