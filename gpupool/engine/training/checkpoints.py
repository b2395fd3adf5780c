"""The checkpoints of a training: what they hold, when they are made, what it resumes from.

A file is what `torch.save` makes of plain data, followed by a mark. `torch.load` reads it as it is.
It is there whole or not at all; one that has been changed or cut short since does not fit its own
checksums, and is passed over. A file without the mark may be the user's: it is neither written over
nor removed. Runs on engines, also under `torchrun`.

Random numbers are in no checkpoint: those of a step depend on (seed, rank, step) alone. So all of
it is the same on every rank, but for the statistics of "local" batch norms, of which those of the
first rank count; and the first rank alone writes.
"""

from __future__ import annotations

import io
import re
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

from gpupool.core.errors import DataError, DataNotFoundError, GpuPoolError, TrainingError
from gpupool.core.network import NetworkInfo
from gpupool.core.options.checks import parse_duration_s
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import progress
from gpupool.core.wire import state_dicts
from gpupool.core.wire.events import (
    CheckpointEvent,
    ResumeEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from gpupool.data.reading.normalization import Normalization
from gpupool.data.stores.writable import Target
from gpupool.engine.batches.share import Dataset, num_samples
from gpupool.engine.checkpoint.weights import copying, globals_in, read_without_code
from gpupool.engine.group.forming import World
from gpupool.engine.training.event_log import EventLog
from gpupool.engine.training.run import Run

FORMAT = 3
_MARK = b"gpupool checkpoint\n"
_NAME = re.compile(r"step-([0-9]{8,})\.pt")
_OF_RUN = ("step", "epoch", "samples_done", "kept", "kept_step")  # plain, or replaced as a whole
_MAX_CHARS = 200  # of torch's words in ours

T = TypeVar("T")


# ---- files -----------------------------------------------------------------------------------


class Checkpoints:
    """Files `step-00000037.pt` and so on below `url`, of any protocol that fsspec knows.

    One whose name is taken gets a zero more in it. The `keep` newest of those that it has written,
    or `check` has found, are kept.
    """

    def __init__(self, url: str, keep: int = 2) -> None:
        self._target = Target(url)
        self._keep = keep
        self._thread: threading.Thread | None = None  # of the newest
        self._news: list[CheckpointEvent | DataError] = []
        self._own: set[str] = set()  # what may be removed
        self._replaced: set[str] = set()  # of another training: goes when there is a new one
        self.passed_over: list[str] = []
        """Names of the damaged ones that `load_newest` has met."""

    def url(self, name: str) -> str:
        """The printable URL of a checkpoint."""
        return self._target.name(name)

    def names(self) -> list[str]:
        """The files that are named as checkpoints, the newest last. Raises DataError."""
        return sorted(filter(_NAME.fullmatch, self._target.names()), key=step_of)

    def check(self, step: int = 0, overwrite: bool = False) -> None:
        """Write something there and read it back; what comes is later than `step`.

        With `overwrite` those of a later step are removed when the first new one is complete.

        Raises TrainingError, in one sentence, if checkpoints cannot be kept there, or if there are
        some of a later step, which new ones would be mixed up with.
        """
        try:
            self._target.check()
            own = {name for name in self.names() if self._is_marked(name)}
        except DataError as error:
            raise TrainingError(f"checkpoint: {error}") from None
        later = {name for name in own.difference(self.passed_over) if step_of(name) > step}
        if later and not overwrite:
            raise TrainingError(
                f"checkpoint: {self.url(max(later, key=step_of))} is there already, and this "
                f"training begins after step {step}. resume='auto' continues from it; "
                "overwrite=True starts from scratch and removes it later; or give another folder."
            )
        self._replaced, self._own = later, own - later

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        fixed: Mapping[str, Any] | None = None,
        why_not: Callable[[], str] = lambda: "",
    ) -> None:
        """Copy `state` to the CPU, and have a thread write it; `news` has what comes of it.

        Waits for the one before, should that not be complete yet. What is in `fixed` is saved too,
        and not copied: it must not change any more. `why_not` is asked when the copy is whole:
        unless it says "", nothing is written, for that reason.
        """
        self.finish()  # one copy at a time
        try:
            copy, marks = copying(dict(state))
        except Exception as error:  # what is no tensor may be of any class
            self._news.append(self._failed(step, error))
            return

        def content() -> bytes:
            for mark in marks:
                mark.synchronize()
            if reason := why_not():
                raise DataError(f"that of step {step} is left out: {reason}", "unfinished")
            return packed(copy | dict(fixed or {}))

        work = (step, content)
        self._thread = threading.Thread(
            target=self._write, args=work, name="gpupool-checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self, within_s: float | None = None) -> bool:
        """Wait until everything is written, for so long; whether it is."""
        if self._thread is None:
            return True
        with progress("saving the checkpoint"):
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def news(self) -> list[CheckpointEvent | DataError]:
        """What has become complete, or failed, since the last call."""
        return [self._news.pop(0) for _ in range(len(self._news))]

    def load_newest(self) -> tuple[str, dict[str, Any]] | None:
        """Name and state of the newest one that can be loaded; None if there is none."""
        self.passed_over = []
        for name in reversed(self.names()):
            content = self._target.get(name)
            try:
                return name, self._loaded(name, content)
            except DataError:
                self.passed_over.append(name)
        return None

    def load(self, name: str) -> dict[str, Any]:
        """The state in the checkpoint of this name; tensors on the CPU. Raises DataError."""
        return self._loaded(name, self._target.get(name))

    def _loaded(self, name: str, content: bytes) -> dict[str, Any]:
        if not _is_whole(content):
            raise DataError(
                f"{self.url(name)} is cut short, damaged, or no checkpoint of gpupool; take "
                "another one",
                "damaged",
                url=self.url(name),
            )
        found = read_without_code(content, self.url(name), "state of a training")
        if not isinstance(found, dict):
            raise DataError(f"{self.url(name)} holds no state of a training", "no checkpoint")
        return found

    def _is_marked(self, name: str) -> bool:
        """Whether a training has written it: its end says so."""
        try:
            return self._target.end(name, len(_MARK))[0] == _MARK
        except DataNotFoundError:  # somebody else has removed it
            return False

    # ---- in the thread -------------------------------------------------------------------

    def _write(self, step: int, content: Callable[[], bytes]) -> None:
        """Write a checkpoint, and then remove older ones: there is always a complete one."""
        name = f"step-{step:08}.pt"
        try:
            data = content()
            # Any file that is there may be another program's, but for those that are replaced.
            while not self._target.put(
                name, data, is_new=not (name in self._replaced and self._is_marked(name))
            ):
                name = name.replace("-", "-0")  # the step is the same
            self._own.add(name)
            older = sorted((one for one in self._own if step_of(one) <= step), key=step_of)
            old = {*older[: -self._keep], *self._replaced} - {name}
            self._own, self._replaced = self._own - old, set()
            for one in old:
                if self._is_marked(one):  # another program may have the name by now
                    self._target.remove(one)
            self._news.append(CheckpointEvent(step, self.url(name)))
        except Exception as error:  # not only of the store: an optimizer's state may hold anything
            self._news.append(self._failed(step, error))

    def _failed(self, step: int, error: Exception) -> DataError:
        if isinstance(error, DataError):
            return error
        url = self.url(f"step-{step:08}.pt")
        said = f"{type(error).__name__}: {_first_problem(error)}"
        return DataError(f"{url}: the state cannot be saved ({said})", "cannot save", url=url)


def step_of(name: str) -> int:
    """
    >>> step_of("step-00000037.pt")
    37
    """
    return int(name.removeprefix("step-").removesuffix(".pt"))


def packed(state: Mapping[str, Any]) -> bytes:
    """A state as the bytes of a checkpoint. Raises TrainingError if none could be read again."""
    file = io.BytesIO()
    state_dicts.save(dict(state), file)
    file.write(_MARK)
    return file.getvalue()


def _is_whole(content: bytes) -> bool:
    """Whether it is marked, and fits the checksums that `torch.save` has written, and not read."""
    try:
        globals_in(content)  # nothing is unpacked before
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return content.endswith(_MARK) and archive.testzip() is None
    except Exception:  # the readers of archives raise what they like
        return False


# ---- the state of a training -----------------------------------------------------------------


def _captured(run: Run) -> dict[str, Any]:
    """What the next step changes: tensors where they are, to be copied now.

    The keys of this and of `_facts` are the format of the file.
    """
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "ema": run.ema.state_dict() if run.ema is not None else None,
    }


def _facts(run: Run, event_log: EventLog, dataset: Dataset) -> dict[str, Any]:
    """The rest, which stays as it is."""
    last, validation = run.reporter.last_step, run.reporter.last_validation
    return {name: getattr(run, name) for name in _OF_RUN} | {
        "format": FORMAT,
        "elapsed_s": run.reporter.elapsed_s,
        "judge": run.early_stopping.state_dict(),
        "normalization": run.normalization and [list(part) for part in run.normalization],
        "network": run.network.plain(),
        "told": event_log.state(),
        "last_step": last and asdict(last),
        "last_validation": validation and asdict(validation),
        "training": _identity(run, dataset),
    }


def _restore(run: Run, dataset: Dataset, state: Mapping[str, Any], url: str) -> None:
    """Make `run` what it was when `state` was captured, on however many ranks.

    Options of the optimizer are those of now: a learning rate may have been changed.

    Raises TrainingError if the state is of another training; `url` says where it is from.
    """
    if state.get("format") != FORMAT:
        raise TrainingError(
            f"resume: {url} has format {state.get('format')}, this version of gpupool reads "
            f"{FORMAT}; resume with the version that has written it."
        )
    before = state["training"]
    for name, now in _identity(run, dataset).items():
        # Only within an epoch the size of a batch matters, as it cuts the order.
        if before[name] != now and (name != "batch_size" or state["samples_done"]):
            raise TrainingError(
                f"resume: {url} was made with {before[name][:_MAX_CHARS]}, and this training has "
                f"{now[:_MAX_CHARS]}; to be "
                "resumed it needs the same data in the same order, and the same kind of training. "
                "Give those, or start from scratch without resume."
            )
    try:
        state_dicts.load(run.model, state["model"])
        _load_optimizer(run, state["optimizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"resume: {url} is of another network or optimizer ({_first_problem(error)}); give "
            "those it was made with, or start from scratch without resume."
        ) from None
    scaler, averaged = state["scaler"], state["ema"]
    if run.scaler is not None:
        run.scaler.load_state_dict(scaler)
    if run.ema is not None:
        state_dicts.load(run.ema, averaged)
    run.early_stopping.load_state_dict(state["judge"])
    run.input_shape = NetworkInfo.of_plain(state["network"]).input_shape
    # What the data ask for now holds; what was measured is not measured again.
    if state["normalization"] is not None and run.normalization is None:
        run.normalization = Normalization(*(tuple(part) for part in state["normalization"]))
    run.reporter.resume_time(state["elapsed_s"])
    if state["last_step"] is not None:
        run.reporter.last_step = StepEvent(**state["last_step"])
    if state["last_validation"] is not None:
        run.reporter.last_validation = ValidationEvent(**state["last_validation"])
    # Last: what is half of one training is at no step of it.
    vars(run).update({name: state[name] for name in _OF_RUN})


def _identity(run: Run, dataset: Dataset) -> dict[str, str]:
    """What makes the order of the samples, and the kind of training, each in words."""
    options, classes = run.options, getattr(dataset, "classes", None)
    kind = options.optimizer if isinstance(options.optimizer, str) else "its own"
    named = "no classes" if classes is None else f"the classes {', '.join(map(str, classes))}"
    numbers: Any = options.weights  # one for each sample: too many to be kept
    weighted = "no weights" if numbers is None else f"weights of their own ({crc32(numbers):08x})"
    of_epoch = hasattr(dataset, "epoch_order")  # which depends on the size of a batch
    return {
        "num_samples": f"{num_samples(dataset):,} samples" if num_samples(dataset) else "a stream",
        "classes": named,
        "seed": f"seed={options.seed}",
        "shuffle": f"shuffle={options.shuffle!r}",
        "batch_size": f"batch_size={options.batch_size}" if of_epoch else "any batch_size",
        "weights": weighted,
        "normalize": f"normalize={options.normalize!r}",
        "optimizer": f"optimizer={kind!r}",
        "precision": "precision='fp16'" if run.scaler is not None else "another precision",
        "ema": "ema" if run.ema is not None else "no ema",
    }


def _load_optimizer(run: Run, state: Mapping[str, Any]) -> None:
    """Load what the optimizer has gathered; of ours, with the settings that it has been made with.

    One of the user's may keep what it gathers among its settings: these are loaded too.
    """
    if isinstance(run.options.optimizer, str):
        # The learning rate may be another one since. torch compares the sizes of the groups.
        saved, now = state["param_groups"], run.optimizer.state_dict()["param_groups"]
        groups = [group | {"params": old["params"]} for group, old in zip(now, saved, strict=True)]
        state = {**state, "param_groups": groups}
    run.optimizer.load_state_dict(dict(state))


def _first_problem(error: BaseException) -> str:
    """The first of what torch lists, under a headline that says nothing more."""
    headline, *listed = str(error).split("\n")
    first = listed[0].strip() if listed and headline.endswith(":") else headline
    return first.rstrip(".")[:_MAX_CHARS]


def epoch_of(run: Run) -> int:
    """The epoch of the last complete step; 0 before the first. `run` may be in the next already."""
    if not run.step:
        return 0
    return run.epoch if run.samples_done else run.epoch - 1


# ---- when ------------------------------------------------------------------------------------


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
        every = options.checkpoint_every or "epoch"
        is_time = isinstance(every, str) and every != "epoch"
        self._every_s = parse_duration_s(every) if is_time else None
        self._every = every
        self._saved_step = -1
        self._saved_at = clock()

    def begin(self) -> bool:
        """Load what `options.resume` names into `run`, and emit its events again; whether it did.

        Then makes sure that checkpoints can be written.

        Raises TrainingError, on every rank, if that cannot be, or is of another training.
        """
        run, checkpoints = self._run, self._checkpoints
        found = _find(run.options, checkpoints, run.world)
        if found is not None:
            fail_together(run.world, lambda: self._resume(*found))
        if checkpoints is not None:
            for name in checkpoints.passed_over:
                words = f"{checkpoints.url(name)} is cut short or damaged, and was passed over."
                run.reporter.emit(WarningEvent("resume", words, run.step))
            check = partial(checkpoints.check, run.step, run.options.overwrite)
            fail_together(run.world, check if self._writes else lambda: None)
        self._saved_at = self._clock()
        return found is not None

    def is_due(self, *, ends_epoch: bool) -> bool:
        """Whether a checkpoint is due after this step, as every rank knows."""
        if self._checkpoints is None or self._saved_step == self._run.step:
            return False
        if self._every_s is not None:
            return "save" in self._run.reporter.requested
        if isinstance(self._every, int):
            return self._run.step % self._every == 0
        return ends_epoch

    def is_time(self) -> bool:
        """Whether a checkpoint is due by the clock of the first rank, which requests it."""
        passed_s = self._clock() - self._saved_at
        return self._writes and self._every_s is not None and passed_s >= self._every_s

    def save(self) -> None:
        """Begin to write `run`; the reporter has been flushed."""
        if self._checkpoints is None or self._saved_step == self._run.step:
            return
        # On every rank, as `is_due` has to answer alike everywhere.
        self._saved_step, self._saved_at = self._run.step, self._clock()
        self._run.reporter.requested -= {"save"}
        if self._writes:
            facts = _facts(self._run, self._event_log, self._dataset)
            why_not = self._run.completed.why_spoilt
            self._checkpoints.save(
                _captured(self._run), self._run.step, fixed=facts, why_not=why_not
            )

    def report_news(self) -> None:
        """Report checkpoints that became complete, or failed."""
        for one in self._checkpoints.news() if self._checkpoints is not None else ():
            if isinstance(one, DataError):
                words = f"a checkpoint could not be written: {one}"
                self._run.reporter.emit(WarningEvent("checkpoint", words, self._run.step))
            else:
                self._run.reporter.emit(one)

    def end(self, within_s: float | None = None) -> None:
        """Save the last complete step, if it is not saved yet, and wait until all is written.

        Also after an error, unless the optimizer was just changing weights: no other rank is asked
        anything. What is not written `within_s` is reported, and may become complete later.
        """
        run, checkpoints = self._run, self._checkpoints
        if checkpoints is None:
            return
        is_written = checkpoints.finish(within_s)
        # Nothing is resumed from weights that are no numbers.
        if is_written and run.step and run.is_step_complete and not run.has_diverged:
            self.save()
            is_written = checkpoints.finish(within_s)
        self.report_news()
        if not is_written:
            words = f"the last checkpoint is still being written after {within_s:g} s"
            run.reporter.emit(WarningEvent("checkpoint", words, run.step))

    def _resume(self, url: str, loaded: dict[str, Any]) -> None:
        """Make `run` what it was, and emit its events again."""
        run = self._run
        try:
            _restore(run, self._dataset, loaded, url)
            self._saved_step = run.step
            run.reporter.emit(ResumeEvent(run.step, url))
            if run.world.rank == 0:
                self._event_log.replay(loaded["told"])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise TrainingError(
                f"resume: {url} holds no whole state of a training ({type(error).__name__}: "
                f"{_first_problem(error)}); take another checkpoint."
            ) from None


def resuming(options: TrainingOptions, world: World) -> TrainingOptions:
    """The options of another attempt: from its own newest checkpoint, if it has made one."""

    def look() -> list[str]:  # the first rank does: on another host the folder may be another one
        is_first = options.checkpoint and world.rank == 0
        return Checkpoints(str(options.checkpoint)).names() if is_first else []

    if not world.gather(bool(fail_together(world, look)))[0]:
        return options
    return replace(options, resume="auto", overwrite=False)


def _find(
    options: TrainingOptions, checkpoints: Checkpoints | None, world: World
) -> tuple[str, dict[str, Any]] | None:
    """URL and state of what is resumed, the same on every rank; None to start from scratch."""
    if not options.resume:
        return None
    newest = None
    if options.resume in ("auto", True):
        assert checkpoints is not None  # the options say so
        # The first rank looks, and its answer holds: another one may already see a newer file.
        look: Callable[[], Any] = checkpoints.load_newest if world.rank == 0 else lambda: None
        newest = fail_together(world, look)
        name = world.gather(newest and newest[0])[0]
        if name is None and options.resume is True:
            raise TrainingError(
                f"resume: {checkpoints.url('')} holds no checkpoint; 'auto' starts from scratch "
                "then."
            )
        if name is None:
            return None
    else:  # the URL of one checkpoint
        folder, _, name = str(options.resume).rstrip("/").rpartition("/")
        checkpoints = Checkpoints(folder or ".")
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
