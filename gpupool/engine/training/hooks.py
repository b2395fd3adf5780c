"""What goes along with a training: checkpoints, callbacks, TensorBoard, a trace. Runs on engines.

`fit` says at a few places how far it is; everything else about them is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import Event, WarningEvent
from gpupool.engine.batches.share import Dataset
from gpupool.engine.group.forming import World
from gpupool.engine.probe.trace import Trace
from gpupool.engine.training.callbacks import Callbacks
from gpupool.engine.training.event_log import Told
from gpupool.engine.training.run import Run
from gpupool.engine.training.saving import Saving, agreed
from gpupool.engine.training.tensorboard import Board


def make_told(
    options: TrainingOptions, world: World, emit: Callable[[Sequence[Event]], None]
) -> Told:
    """What takes the events of a training in: to `emit`, for checkpoints, and for TensorBoard.

    Raises TrainingError, on every rank, if TensorBoard's file cannot be written.
    """
    url = options.tensorboard if world.rank == 0 else None
    return Told(emit, agreed(world, lambda: Board(url) if url else None))


class Companions:
    """Those of one training. All methods are called on every rank alike, but for `failed`.

    Whatever ends training early is put in `run.stopped_by`.
    """

    def __init__(self, run: Run, told: Told, dataset: Dataset) -> None:
        self._run, self._told = run, told
        self._saving = Saving(run, told, dataset)
        self._callbacks = Callbacks(run)
        self._trace = Trace(run.options.profile, run.world)
        self.wishes = {"callback": lambda: self._callbacks.wants_stop, "save": self._saving.is_time}
        """For the ledger, which makes them known to all ranks."""

    def begin(self) -> bool:
        """Go on from a checkpoint if that is wanted; tells whether `run` is another now.

        Raises TrainingError, on every rank: nothing is there, or nothing can be written there.
        """
        resumed = self._saving.begin()
        agreed(self._run.world, self._trace.check)
        self._stop_if(self._callbacks.call("start"))
        return resumed

    def stepped(self) -> None:
        """A step is complete, and the ledger may have been flushed."""
        self._trace.stepped()
        self._callbacks.call("step")
        self._tell_of_board()

    def flushed(self) -> None:
        """The ledger was flushed: all ranks know what each of them wishes."""
        self._saving.tell_news()
        self._stop_if("callback" in self._run.ledger.agreed)

    def validated(self) -> None:
        """There was a validation."""
        self._stop_if(self._callbacks.call("validation"))

    def epoch_ended(self) -> None:
        """An epoch is over, with what belongs to it, and `run` at the beginning of the next."""
        self._stop_if(self._callbacks.call("epoch"))

    def is_due(self) -> bool:
        """Whether this step, which ends no epoch, is saved, as far as its number says."""
        return self._saving.is_due(ends_epoch=False)

    def save_if_due(self, *, ends_epoch: bool = False) -> None:
        """Between two steps, after what belongs to the last one."""
        if self._saving.is_due(ends_epoch=ends_epoch):
            if self._run.ledger.unreported():
                self._run.ledger.flush()
                self.flushed()
            self._saving.save()
            self._stop_if(self._callbacks.call("checkpoint"))

    def failed(self, within_s: float | None = None) -> None:
        """Training ends with an error, and `run` is as it was after its last complete step.

        On the ranks that this happens on; no other one is asked anything. A checkpoint that takes
        longer than `within_s` is not waited for.
        """
        self._saving.failed(within_s)
        self._trace.drop()
        self._close_board()

    def end(self) -> None:
        """Training is over, but for the last event."""
        self._saving.end()
        if self._run.options.profile is not None:
            self._warn("profile", list(dict.fromkeys(self._run.world.gather(self._trace.end()))))
        self._callbacks.call("end")

    def close(self) -> None:
        """Before the last event, which neither of them keeps."""
        self._close_board()
        self._tell_of_board()

    def _stop_if(self, wanted: bool) -> None:
        if wanted and not self._run.stopped_by:
            self._run.stopped_by = "callback"

    def _warn(self, about: str, sentences: Sequence[str]) -> None:
        for sentence in filter(None, sentences):
            self._run.ledger.tell(WarningEvent(about, sentence, self._run.step))

    def _tell_of_board(self) -> None:
        if self._told.board is not None:
            self._warn("tensorboard", self._told.board.failures())

    def _close_board(self) -> None:
        if self._told.board is not None:
            self._told.board.close()
