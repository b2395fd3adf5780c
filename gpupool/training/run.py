"""Train one network on the ranks of the pool that train. Runs on the client.

The job is pickled once, and read by each of them; the first one sends events while it trains, and
leaves the weights in a file. When a rank dies, the pool replaces it, and the same job resumes from
its last checkpoint, if that is wanted.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpupool.core import current
from gpupool.core.errors import PoolError, SpmdError
from gpupool.core.network import NetworkInfo, give
from gpupool.core.options.fields import changed
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire import events
from gpupool.core.wire.calls import Train
from gpupool.core.wire.output import OnOutput, OutputKind
from gpupool.core.wire.pickles import copy_of
from gpupool.core.wire.replies import TrainReply
from gpupool.core.wire.requests import Stop, Waits
from gpupool.core.wire.state_dicts import load
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder, RankOutput
from gpupool.pool.calls.presses import ignore_for_a_moment
from gpupool.pool.pool import Pool
from gpupool.training.doctor import Diagnosis, diagnose
from gpupool.training.history import TrainingHistory
from gpupool.training.job import prepared, send_job
from gpupool.training.result import TrainingResult, picture_transform

if TYPE_CHECKING:
    from torch import nn

_LOOK_EVERY_S = 0.25
_STORE_S = 1.0  # a store that has not answered for so long hangs, or fails
_BATCH_S = 10.0  # a data set of the user's that nobody else knows anything of

Listener = Callable[[TrainingHistory], None]


class TrainingRun:
    """A training that continues in the background: a future with a live history.

    `show` is called with it before the ranks start, to add listeners. So many as `num_ranks` train,
    the first of those that can; 0: all. Raises TrainingError for input that cannot be trained on.
    """

    def __init__(
        self,
        pool: Pool,
        model: nn.Module,
        dataset: Any,
        loss: Any,
        options: TrainingOptions,
        validation: Any,
        show: Callable[[TrainingRun], None] = lambda run: None,
        num_ranks: int = 0,
    ) -> None:
        # Before the checks: they look at the ranks, and one may be about to be replaced.
        pool.wait_until_usable()
        job = prepared(model, dataset, loss, options, validation)
        self.options, self.loss, self._validation = job.options, job.loss, job.validation
        self._transform = picture_transform(job.validation)
        self.history = TrainingHistory(options=changed(job.options))
        self._pool, self._num_ranks = pool, num_ranks
        self._ranks = pool.training_ranks[: num_ranks or None]
        # A copy: `train` promises to leave the module alone, and the result gets these weights.
        self._model = copy_of(model).cpu()
        self._network = job.network or NetworkInfo()
        self._listeners: list[Listener] = []
        self._result: Callable[[], TrainingResult | None] = lambda: None
        self._error: BaseException | None = None
        self._trial = current.trial.get()  # of a sweep
        self._end: events.EndEvent | None = None  # told when the weights are there
        self._over: Future[None] = Future()
        self._stopping = self._aborting = False
        self._last_step = -1  # of the newest checkpoint when a rank died
        self._weights_path = pool.engines.new_file("weights.pt")
        self._job = send_job(pool, replace(job, model=self._model))
        self.on_print: OnOutput = lambda rank, kind, content: None
        """Called with what ranks print, in a background thread."""
        self._recorder = OutputRecorder(
            self._ranks, pool.secrets, lambda *printed: self.on_print(*printed)
        )
        self.outputs: Mapping[int, RankOutput] = self._recorder.outputs
        self.history.add(events.ProgressEvent("waiting for the ranks", 0, 0))
        show(self)  # before the ranks start, so that no event is lost
        self._execution = self._begin()
        threading.Thread(target=self._finish, name="gpupool-training", daemon=True).start()

    def __repr__(self) -> str:
        return f"TrainingRun({self.history.line()})"

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(history)` after every batch of events and after the end, in a thread."""
        self._listeners.append(listener)

    def text(self, rank: int) -> str:
        """What a rank that trains has printed so far."""
        return self._recorder.text(rank)

    def doctor(self) -> Diagnosis:
        """Why it is slow, as far as it has come, and what to do next."""
        return diagnose(self.history)

    def done(self) -> bool:
        """Whether training is over."""
        return self._over.done()

    def stop(self) -> None:
        """End training after the same step on every rank and keep the network; returns at once.

        Where a rank waits for data that do not come, after the last complete step.
        """
        if self.history.is_over:
            return
        self.history.status = "stopping"
        if not self._stopping:
            self._stopping = True
            # `stop` may be called in the middle of anything, so a thread waits for the answers.
            threading.Thread(target=self._see_it_stop, name="gpupool-stop", daemon=True).start()
        self._ask_to_stop()

    def result(self, tick: Callable[[], None] = lambda: None) -> TrainingResult:
        """The result, after waiting for it.

        The first Ctrl-C (or the notebook's stop button) is `stop()`; a second one, more than a
        second later, interrupts the ranks at once. The network is lost then, but for what is in the
        last checkpoint, which the error names.

        `tick` is called every 0.1 s while it waits, in this thread. Raises SpmdError.
        """
        is_pressed = False
        while not self.done():
            try:
                # Short waits: `tick` draws between them, in the thread whose cell it is.
                wait([self._over], 0.1)
                tick()
            except KeyboardInterrupt:
                ignore_for_a_moment()
                if not is_pressed:
                    is_pressed = True
                    self.stop()
                elif not self.done():
                    self._aborting = True
                    self._execution.interrupt()
        if self._error is not None:
            raise self._error
        found = self._result()
        if found is None:
            data = self._transform, self._validation, self.loss
            found = TrainingResult(self._model, self.history, self.options, self.outputs, *data)
            # The picture of the run stays in the notebook, and knows the run: data must not stay.
            self._result, self._validation = weakref.ref(found), None
        return found

    # ---- in the background ---------------------------------------------------------------

    def _begin(self, *, again: bool = False) -> Execution[TrainReply]:
        self._job.bring_constants(self._pool, self._ranks)
        call = Train(self._job.wire, self._weights_path.name, again, self._num_ranks)
        execution = Execution(
            self._pool, dict.fromkeys(self._ranks, call), self._on_output, on_notice=self._on_notice
        )
        execution.ends_well = self.stop
        return execution

    def _ask_to_stop(self, wait_s: float = 0.0, *, at_once: bool = False) -> dict[int, Waits]:
        """Gives what those that answer within `wait_s` report of the data they wait for."""
        asked = self._pool.engines.control(Stop(self._job.wire.name, at_once), self._ranks)
        done = wait(asked.values(), timeout=wait_s).done
        found = {rank: future.result().found for rank, future in asked.items() if future in done}
        return {rank: waits for rank, waits in found.items() if waits is not None}

    def _see_it_stop(self) -> None:
        """Ranks hear of it between two steps: where the data of one do not come, have all of them
        end after their last complete step."""
        while not wait([self._over], _LOOK_EVERY_S).done:
            for rank, waits in self._ask_to_stop(_LOOK_EVERY_S).items():
                # The smaller of both: while the store answers, a slow batch will come.
                hangs = min(waits.batch_s, waits.store_s) > _STORE_S
                if not hangs and waits.batch_s <= _BATCH_S:
                    continue
                why = f" ({waits.reason})" if waits.reason else ""
                words = (
                    f"stopped while rank {rank} waited for its data, for {waits.batch_s:.0f} s so "
                    f"far{why}; the step that had begun is left out."
                )
                self.history.add(events.WarningEvent(words, len(self.history.steps)))
                self._notify()
                # First: when the interrupt comes, each rank must know that it is no error.
                self._ask_to_stop(_LOOK_EVERY_S, at_once=True)
                self._pool.group.abort(dict.fromkeys(self._ranks, self._execution.number))
                return

    def _on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        if kind is not OutputKind.EVENTS:
            self._recorder(rank, kind, content)
            return
        for event in content:
            match event:
                case events.EndEvent():
                    self._end = event
                    continue
                case events.StartEvent():
                    event = self._with_places(event)
                case events.ResumeEvent():
                    self._tell_restart(f" from step {event.step}")
                case events.StepEvent(step=1):  # without a checkpoint
                    self._tell_restart(" from the beginning")
                case events.ValidationEvent():
                    self._tell_trial(event)
            self.history.add(event)
        self._notify()

    def _with_places(self, event: events.StartEvent) -> events.StartEvent:
        """With what only the client knows: which ranks train, and where."""
        here = [self._pool.ranks[rank] for rank in self._ranks]
        # GPUs are numbered as on their machine.
        devices = tuple(f"cuda:{r.gpu.label} {r.gpu.name}" if r.gpu else "CPU" for r in here)
        hosts = tuple(rank.host for rank in here if rank.host)
        return replace(event, ranks=self._ranks, devices=devices, hosts=hosts)

    def _tell_restart(self, place: str) -> None:
        """The last sentence on a lost rank says from where training has resumed, once."""
        said = self.history.restarts
        if said and said[-1].endswith("training resumed"):
            said[-1] += place

    def _tell_trial(self, event: events.ValidationEvent) -> None:
        """Report a validation to the trial of a sweep that this is part of, which may end it."""
        if self._trial is None or self._error is not None:
            return
        values = {"loss": event.loss, "accuracy": event.accuracy, **event.metrics}
        try:
            self._trial(event.step, {n: value for n, value in values.items() if value is not None})
        except Exception as error:
            self._error = error
            self.stop()

    def _on_notice(self, text: str | None) -> None:
        if not self.history.is_over:
            self.history.notice = text or ""
            self._notify()

    def _finish(self) -> None:
        try:
            reply = self._wait()[self._ranks[0]]
            # Before the end is reported: to views it means that the network is there.
            self._load_weights(reply)
            if self._end is not None:
                self.history.add(self._end)
        except BaseException as error:  # raised again in the thread that asks for the result
            self._error = self._with_checkpoint(error)
            self.history.status, self.history.error = "failed", str(error)
        self.history.notice = ""
        self._job.contents.clear()
        self._weights_path.unlink(missing_ok=True)
        self._recorder.finish()
        self._notify()
        self._over.set_result(None)

    def _wait(self) -> dict[int, TrainReply]:
        """The replies of the ranks, after as many attempts as it takes."""
        while True:
            try:
                return self._execution.result()
            except SpmdError as error:
                if not self._may_resume(error):
                    raise
                # Its first clause says how the rank ended; what follows is advice for a cell.
                how = re.split(r"[;.\n]", error.first.evalue)[0]
                self._on_notice(f"{how}; it is replaced")
                try:
                    self._pool.wait_until_usable()
                except PoolError:  # it could not be replaced: the loss is what is to be said
                    raise error from None
                # A second press may have come while the rank was replaced.
                if self._aborting:
                    raise
                self.history.restarts.append(f"{how}; it was replaced, and training resumed")
                # `again`: from the newest checkpoint, whatever the options say about `resume`. With
                # `overwrite` that is another training's as long as this one has reported none.
                is_own = isinstance(self.history.newest, events.CheckpointEvent)
                self._execution = self._begin(again=is_own or not self.options.overwrite)
                if self._stopping:  # the new rank has not heard of it
                    self._ask_to_stop()

    def _may_resume(self, error: SpmdError) -> bool:
        """Whether to go on after a failure: only after a rank's death, and only with a newer
        checkpoint than at the last one: what kills a rank at one place would do so for ever."""
        # By the first error: ranks that were freed from a collective report errors of their own.
        is_death = error.first.ename == "EngineDiedError"
        if self._aborting or self.options.on_failure != "resume" or not is_death:
            return False
        before, newest = self._last_step, self.history.newest
        self._last_step = newest.step if newest else 0
        return self._last_step > before

    def _with_checkpoint(self, error: BaseException) -> BaseException:
        newest = self.history.newest
        if newest is None or not isinstance(error, SpmdError):
            return error
        how = "auto" if isinstance(newest, events.CheckpointEvent) else newest.url
        line = f"The checkpoint after step {newest.step} is at {newest.url}; resume={how!r} resumes"
        hint = "\n".join(filter(None, [error.first.hint, f"{line} from it."]))
        errors = {**error.errors, error.first.rank: replace(error.first, hint=hint)}
        # A new error, as its message is made of the parts.
        return SpmdError(errors, error.num_ranks).with_traceback(error.__traceback__)

    def _load_weights(self, reply: TrainReply) -> None:
        import torch

        self.history.add(events.ProgressEvent("reading the network", 0, 0))
        self._notify()
        path = self._pool.carrier.bring_file(self._ranks[0], self._weights_path)
        load(self._model, torch.load(path, map_location="cpu", weights_only=True))
        scaling, shape = reply.normalization, reply.input_shape
        give(self._model, replace(self._network, normalization=scaling, input_shape=shape))

    def _notify(self) -> None:
        for listener in self._listeners:
            try:
                listener(self.history)
            except Exception:  # its own affair: the training continues, and the others hear of it
                logging.getLogger("gpupool").exception("a listener of a training has failed")
