"""When a training saves its state, and what it resumes from. Runs on engines.

All that a checkpoint holds is the same on every rank, but for the statistics of "local" batch
norms, of which those of the first rank count. So the first rank alone writes, and needs no other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from gpupool.core.errors import DataError, GpuPoolError, TrainingError
from gpupool.core.options.pool_options import parse_duration_s
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import CheckpointEvent, ResumeEvent, WarningEvent
from gpupool.core.wire.state_dicts import check_extra_state
from gpupool.engine.batches.share import Dataset
from gpupool.engine.calls import uninterrupted
from gpupool.engine.checkpoint.files import Checkpoints
from gpupool.engine.group.forming import World
from gpupool.engine.training import run_state
from gpupool.engine.training.event_log import EventLog
from gpupool.engine.training.run import Run

T = TypeVar("T")


class Saving:
    """The checkpoints of one training as `run.options` ask for them; without any it does nothing.

    `save` and `is_due` are called on every rank alike, between two steps.
    """

    def __init__(
        self,
        run: Run,
        event_log: EventLog,
        dataset: Dataset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = run.options
        self._run, self._event_log, self._dataset, self._clock = run, event_log, dataset, clock
        self._checkpoints = (
            Checkpoints(options.checkpoint, options.num_checkpoints) if options.checkpoint else None
        )
        self._writes = self._checkpoints is not None and run.world.rank == 0
        self._every_steps, self._every_s, self._every_epoch = _intervals(options)
        self._saved_step = -1
        self._saved_at = clock()

    def begin(self) -> bool:
        """Load what `options.resume` names into `run`, and emit its events again; whether it did.

        Then makes sure that checkpoints can be written.

        Raises TrainingError, on every rank, if that cannot be, or is of another training.
        """
        run = self._run
        found = _find(run.options, self._checkpoints, run.world)
        if found is not None:
            fail_together(run.world, lambda: self._resume(*found))
            self._saved_step = run.step
        if self._checkpoints is not None:
            checkpoints, step = self._checkpoints, run.step
            for name in checkpoints.passed_over:
                words = f"{checkpoints.url(name)} is cut short or damaged, and was passed over."
                run.reporter.emit(WarningEvent("resume", words, step))
            fail_together(self._run.world, lambda: check_extra_state(run.model))
            fail_together(
                self._run.world,
                (lambda: checkpoints.check(step, run.options.overwrite))
                if self._writes
                else _nothing,
            )
        self._saved_at = self._clock()
        return found is not None

    def is_due(self, *, ends_epoch: bool) -> bool:
        """Whether a checkpoint is due after this step, as every rank knows."""
        if self._checkpoints is None or self._saved_step == self._run.step:
            return False
        if self._every_epoch:
            return ends_epoch
        if self._every_s is not None:
            return "save" in self._run.reporter.requested
        return bool(self._every_steps) and self._run.step % self._every_steps == 0

    def save(self) -> None:
        """Begin to write `run`; the reporter has been flushed."""
        if self._checkpoints is None or self._saved_step == self._run.step:
            return
        # On every rank, as `is_due` has to answer alike everywhere.
        self._saved_step, self._saved_at = self._run.step, self._clock()
        self._run.reporter.requested -= {"save"}
        if self._writes:
            fixed = run_state.facts(self._run, self._event_log, self._dataset)
            self._checkpoints.save(
                run_state.capture(self._run),
                self._run.step,
                fixed=fixed,
                why_not=self._run.completed.why_spoilt,
            )

    def is_time(self) -> bool:
        """Whether a checkpoint is due by the clock of the first rank, which requests it."""
        if not self._writes or self._every_s is None:
            return False
        return self._clock() - self._saved_at >= self._every_s

    def report_news(self) -> list[DataError]:
        """Report checkpoints that became complete, or failed; returns the failures."""
        if not self._writes:
            return []
        assert self._checkpoints is not None
        written, failures = self._checkpoints.news()
        for one in written:
            self._run.reporter.emit(CheckpointEvent(one.step, one.url))
        for error in failures:
            sentence = f"a checkpoint could not be written: {error}"
            self._run.reporter.emit(WarningEvent("checkpoint", sentence, self._run.step))
        return failures

    def save_after_error(self, within_s: float | None = None) -> None:
        """Training ends with an error: save `run` as it is after its last complete step, and wait.

        What is not written `within_s` is reported, and may become complete later.

        Not if the error has come while the optimizer was changing weights: that is half a step.
        No other rank is asked anything. What cannot be written adds a note to the error. Interrupts
        meanwhile do not cut it off: the pool ends a rank that takes too long.
        """
        if not self._writes:
            return
        error = sys.exception()  # what ends the training; problems of saving must not hide it
        problems: list[Exception] = []

        def save() -> None:
            try:
                self._save_last(within_s)
            except Exception as problem:  # a GPU that has failed gives no tensor away, say
                problems.append(problem)

        with uninterrupted():
            save()
            problems += self.report_news()
        if error is not None and problems:
            error.add_note(f"The last checkpoint could not be written: {problems[-1]}")
        for problem in problems if within_s is not None else ():
            sentence = f"the last checkpoint could not be written: {problem}"
            self._run.reporter.emit(WarningEvent("checkpoint", sentence, self._run.step))

    def end(self) -> None:
        """Save the end, if it is not saved yet, and wait until all is written."""
        if self._checkpoints is None:
            return
        if self._run.stopped_by != "diverged":  # nothing is resumed from such weights
            self.save()
        if self._writes:
            self._checkpoints.finish()
            self.report_news()

    def _resume(self, url: str, loaded: dict[str, Any]) -> None:
        """Make `run` what it was, and emit its events again."""
        run = self._run
        try:
            run_state.restore(run, self._dataset, loaded, url)
            run.reporter.emit(ResumeEvent(run.step, url))
            if run.world.rank == 0:
                self._event_log.replay(loaded["told"])
        except GpuPoolError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = str(error).split("\n")[0]
            raise TrainingError(
                f"resume: {url} holds no whole state of a training ({type(error).__name__}: "
                f"{text}); take another checkpoint."
            ) from None

    def _save_last(self, within_s: float | None) -> None:
        checkpoints, run = self._checkpoints, self._run
        assert checkpoints is not None
        if within_s is not None and not checkpoints.is_written(within_s):
            raise DataError(f"the one before is still being written after {within_s:g} s", "late")
        is_new = run.step > max(self._saved_step, 0)
        if is_new and run.is_step_complete and not run.has_diverged:
            unreported = run.reporter.unreported()
            fixed = run_state.facts(run, self._event_log, self._dataset, unreported)
            why_not = run.completed.why_spoilt
            checkpoints.save(run_state.capture(run), run.step, fixed=fixed, why_not=why_not)
        if within_s is not None and not checkpoints.is_written(within_s):
            raise DataError(f"it is still being written after {within_s:g} s", "late")
        checkpoints.finish()


def resuming(options: TrainingOptions, world: World) -> TrainingOptions:
    """The options of another attempt: from its own newest checkpoint, if it has made one."""

    def look() -> list[str]:  # the first rank does: on another host the folder may be another one
        is_first = options.checkpoint and world.rank == 0
        return Checkpoints(str(options.checkpoint)).names() if is_first else []

    if not world.gather(bool(fail_together(world, look)))[0]:
        return options
    return replace(options, resume="auto", overwrite=False)


def _intervals(options: TrainingOptions) -> tuple[int, float | None, bool]:
    """Every how many steps (0: not by steps), how many seconds, and whether after each epoch."""
    every = options.checkpoint_every
    if every is None or every == "epoch":
        return 0, None, True
    if isinstance(every, int):
        return every, None, False
    return 0, parse_duration_s(every), False


def _find(
    options: TrainingOptions, checkpoints: Checkpoints | None, world: World
) -> tuple[str, dict[str, Any]] | None:
    """URL and state of what is resumed, the same on every rank; None to start from scratch."""
    if not options.resume:
        return None
    # The first rank looks, and its answer holds: another one may already see a newer file.
    if options.resume in ("auto", True):
        assert checkpoints is not None  # the options say so
        newest = fail_together(world, checkpoints.load_newest if world.rank == 0 else _nothing)
        name = world.gather(newest and newest[0])[0]
        if name is None and options.resume is True:
            where = checkpoints.url("")
            raise TrainingError(
                f"resume: {where} holds no checkpoint; 'auto' starts from scratch then."
            )
        if name is None:
            return None
    else:  # the URL of one checkpoint
        folder, _, name = str(options.resume).rstrip("/").rpartition("/")
        checkpoints, newest = Checkpoints(folder or "."), None
    found = checkpoints
    loaded = fail_together(world, lambda: newest[1] if newest else found.load(name))
    return checkpoints.url(name), loaded


def fail_together(world: World, work: Callable[[], T]) -> T:
    """What `work` returns on this rank. If it fails on one, all ranks raise TrainingError."""
    value, problem = None, None
    try:
        value = work()
    except GpuPoolError as error:
        problem = TrainingError(str(error))
    # Every rank gets here, so none waits for one that has failed.
    first = next(filter(None, world.gather(problem)), None)
    if first is not None:
        raise first
    return value  # type: ignore[return-value]


def _nothing() -> None:
    """What a rank does that has nothing to do."""
