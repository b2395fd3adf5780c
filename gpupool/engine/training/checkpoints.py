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

import contextlib
import io
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

from gpupool.core.errors import DataError, GpuPoolError, TrainingError
from gpupool.core.network import NetworkInfo
from gpupool.core.options.checks import parse_duration_s
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import progress
from gpupool.core.wire import events, state_dicts
from gpupool.data.stores.writable import Target
from gpupool.engine.batches.shares import Dataset, num_samples
from gpupool.engine.checkpoint.weights import check_stored, copying, cut, problem_of, read_safely
from gpupool.engine.group.forming import World
from gpupool.engine.training.reports import EventLog
from gpupool.engine.training.run import Run

FORMAT = "5"
_MARK = b"gpupool checkpoint\n"
_NAME = re.compile(r"step-([0-9]{8,})\.pt")
_OF_RUN = ("step", "epoch", "samples_done", "kept", "kept_step")  # plain, or replaced as a whole

T = TypeVar("T")


# ---- files -----------------------------------------------------------------------------------


class Checkpoints:
    """Files `step-00000037.pt` and so on below `url`, of any protocol that fsspec knows.

    One whose name is taken gets a zero more in it. The `keep` newest of those that it has written,
    or `check` has found, are kept. `news` are events of what became complete, or failed;
    `passed_over` are those that `load_newest` could not load, and why.
    """

    def __init__(self, url: str, keep: int = 2) -> None:
        self.target, self._keep = Target(url), keep
        self._thread: threading.Thread | None = None  # of the newest
        self._own: set[str] = set()  # what may be removed
        self._replaced: set[str] = set()  # of another training: goes when there is a new one
        self.news: list[events.CheckpointEvent | events.WarningEvent] = []
        self.passed_over: dict[str, DataError] = {}

    def names(self) -> list[str]:
        """The files that are named as checkpoints, the newest last. Raises DataError."""
        return sorted(filter(_NAME.fullmatch, self.target.names()), key=step_of)

    def check(self, step: int = 0, overwrite: bool = False) -> None:
        """Write something there and read it back; what comes is later than `step`.

        Raises DataError; or TrainingError if there are some of a later step, with which new ones
        would be mixed up. With `overwrite` these are removed when the first new one is complete.
        """
        self.target.check()
        is_ours = {name: self.target.end(name, len(_MARK)) == _MARK for name in self.names()}
        own = {name for name in is_ours if is_ours[name] and name not in self.passed_over}
        self._replaced = {name for name in own if step_of(name) > step}
        self._own = own - self._replaced
        if self._replaced and not overwrite:
            raise TrainingError(
                f"{self.target.name(max(self._replaced, key=step_of))} is there already, and this "
                f"training begins after step {step}. resume='auto' continues from it; "
                "overwrite=True starts from scratch and removes it later; or give another folder."
            )

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        fixed: Mapping[str, Any] | None = None,
        why_not: Callable[[], str] = lambda: "",
    ) -> None:
        """Copy `state` to the CPU, and have a thread write it, with what is `fixed` and not copied.

        Waits for the one before. `why_not` is asked when the copy is whole: unless it says "",
        nothing is written, for that reason.
        """
        self.finish()  # one copy at a time
        with self._failing(step):
            copy, marks = copying(dict(state))

            def write() -> None:
                with self._failing(step):
                    for mark in marks:
                        mark.synchronize()
                    if reason := why_not():
                        raise DataError(f"that of step {step} is left out: {reason}", "unfinished")
                    self._write(step, packed(copy | dict(fixed or {})))

            self._thread = threading.Thread(target=write, name="gpupool-checkpoint", daemon=True)
            self._thread.start()

    def _write(self, step: int, data: bytes) -> None:
        name = f"step-{step:08}.pt"
        # Any file that is there may be another program's, but for those that are replaced.
        while not self.target.put(name, data, is_new=name not in self._replaced):
            name = name.replace("-", "-0")  # the step is the same
        self._own.add(name)
        old = {*sorted(self._own, key=step_of)[: -self._keep], *self._replaced} - {name}
        self._own, self._replaced = self._own - old, set()
        for one in old:  # last: there is always a complete one
            self.target.remove(one)
        self.news.append(events.CheckpointEvent(step, self.target.name(name)))

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """What fails in it is a warning: a state may hold objects of any class."""
        try:
            yield
        except Exception as error:
            said = str(error)
            if not isinstance(error, DataError):
                said = f"the state of step {step} is of another kind ({problem_of(error)})"
            said = f"a checkpoint could not be written: {said}"
            self.news.append(events.WarningEvent(said, step))

    def finish(self, within_s: float | None = None) -> bool:
        """Wait until everything is written, for so long; whether it is."""
        if self._thread is None:
            return True
        with progress("saving the checkpoint"):
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def load_newest(self) -> tuple[str, dict[str, Any]] | None:
        """Name and state of the newest one that can be loaded; None if there is none. Raises
        DataError where one would have to run code to be read, and no other can be loaded."""
        self.passed_over = {}
        for name in reversed(self.names()):
            try:
                return name, self.load(name)
            except DataError as error:
                if error.kind not in ("damaged", "not safe"):
                    raise
                self.passed_over[name] = error
        hostile = [error for error in self.passed_over.values() if error.kind == "not safe"]
        if hostile:
            raise hostile[-1]
        return None

    def load(self, name: str) -> dict[str, Any]:
        """The state in the checkpoint of this name; tensors on the CPU. Raises DataError."""
        content, url, found = self.target.get(name), self.target.name(name), None
        if _is_whole(content):
            found = read_safely(content, url, "state of a training")
        if not isinstance(found, dict):
            what = f"{url} is cut short, damaged, or no checkpoint of gpupool; take another one"
            raise DataError(what, "damaged", url=url)
        return found


def step_of(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(".pt"))


def packed(state: Mapping[str, Any]) -> bytes:
    """A state as the bytes of a checkpoint. Raises TrainingError if none could be read again."""
    file = io.BytesIO()
    state_dicts.save(dict(state), file)
    return file.getvalue() + _MARK


def _is_whole(content: bytes) -> bool:
    """Whether it is marked, and fits the checksums that `torch.save` has written, and not read."""
    try:
        check_stored(content)
        is_same = zipfile.ZipFile(io.BytesIO(content)).testzip() is None
        return is_same and content.endswith(_MARK)
    except Exception:  # the readers of archives raise what they like
        return False


# ---- the state of a training -----------------------------------------------------------------


class Saving:
    """The checkpoints of one training as `run.options` ask for them; without any it does nothing.

    `save` and `is_due` are called on every rank alike, between two steps.
    """

    def __init__(self, run: Run, event_log: EventLog, dataset: Dataset) -> None:
        folder, every = run.options.checkpoint, run.options.checkpoint_every or "epoch"
        self._run, self._event_log, self._dataset = run, event_log, dataset
        self._files = Checkpoints(folder, run.options.num_checkpoints) if folder else None
        is_time = isinstance(every, str) and every != "epoch"
        self._every, self._every_s = every, parse_duration_s(every) if is_time else None
        self._saved_step, self._saved_at = -1, time.monotonic()
        if self._files is not None:
            run.reporter.news = self._files.news

    def is_due(self, *, ends_epoch: bool) -> bool:
        if self._files is None or self._saved_step == self._run.step:
            return False
        if isinstance(self._every, int):
            return self._run.step % self._every == 0
        return ends_epoch if self._every == "epoch" else "save" in self._run.reporter.requested

    def is_time(self) -> bool:
        if self._every_s is None or self._run.world.rank != 0:
            return False
        return time.monotonic() - self._saved_at >= self._every_s

    def save(self) -> None:
        """Begin to write `run`; the reporter has been flushed."""
        run, reporter = self._run, self._run.reporter
        if self._files is None or self._saved_step == run.step:
            return
        # On every rank, as `is_due` has to answer alike everywhere.
        self._saved_step, self._saved_at = run.step, time.monotonic()
        reporter.requested -= {"save"}
        if run.world.rank != 0:
            return
        # The keys of both are the format of the file.
        changing = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scaler": run.scaler and run.scaler.state_dict(),
            "ema": run.ema and run.ema.state_dict(),
        }
        fixed = {name: getattr(run, name) for name in _OF_RUN} | {
            "training": self._identity(),
            "elapsed_s": reporter.elapsed_s,
            "judge": {"best": run.best, "num_worse": run.num_worse},
            "network": asdict(run.network),
            "told": self._event_log.state(),
            "last_step": reporter.last_step and asdict(reporter.last_step),
            "last_validation": reporter.last_validation and asdict(reporter.last_validation),
        }
        self._files.save(changing, run.step, fixed, run.completed.why_spoilt)

    def end(self, within_s: float | None = None) -> None:
        """Save the last complete step, if it is not saved yet, and wait until all is written.

        Also after an error, unless the optimizer was just changing weights: no other rank is asked
        anything. What is not written `within_s` is reported, and may become complete later.
        """
        run, files = self._run, self._files
        if files is None:
            return
        is_written = files.finish(within_s)
        # Nothing is resumed from weights that are no numbers.
        if is_written and run.step and run.is_step_complete and not run.has_diverged:
            self.save()
            is_written = files.finish(within_s)
        run.reporter.emit_news()
        if not is_written:
            words = f"the last checkpoint is still being written after {within_s:g} s"
            run.reporter.emit(events.WarningEvent(words, run.step))

    def begin(self) -> bool:
        """Load what `options.resume` names into `run`, and emit its events again; whether it did.

        Then makes sure that checkpoints can be written. Raises TrainingError, on every rank, if
        that cannot be, or is of another training.
        """
        run, files = self._run, self._files
        found = _find(run.options, files, run.world)
        if found is not None:
            fail_together(run.world, lambda: self._restore(*found), "resume: ")
        if files is not None:
            for name in files.passed_over:
                words = f"{files.target.name(name)} is cut short or damaged, and was passed over."
                run.reporter.emit(events.WarningEvent(words, run.step))
            check = partial(files.check, run.step, run.options.overwrite)
            on_first(run.world, check, "checkpoint: ")
        self._saved_at = time.monotonic()
        return found is not None

    def _identity(self) -> dict[str, str]:
        """What makes the order of the samples, and the kind of training: it must be as before."""
        run, dataset, options = self._run, self._dataset, self._run.options
        num, numbers = num_samples(dataset), options.weights
        is_cut_anew = hasattr(dataset, "epoch_order")  # for each size of a batch
        return {name: repr(getattr(options, name)) for name in ("seed", "shuffle", "normalize")} | {
            "format": FORMAT,
            "data": f"{num:,} samples" if num else "a stream",
            "classes": ", ".join(map(str, getattr(dataset, "classes", None) or ())),
            "batch_size": str(options.batch_size) if is_cut_anew else "any",
            # One for each sample: too many to be kept.
            "weights": "None" if numbers is None else f"others ({crc32(numbers):08x})",  # type: ignore[arg-type]
            "optimizer": options.optimizer if isinstance(options.optimizer, str) else "its own",
            "precision='fp16'": str(run.scaler is not None),
            "ema": str(run.ema is not None),
        }

    def _restore(self, url: str, state: dict[str, Any]) -> None:
        run, before = self._run, state.get("training", {})
        try:
            for name, now in self._identity().items():
                # Only within an epoch the size of a batch matters, as it cuts the order.
                if before[name] != now and (name != "batch_size" or state["samples_done"]):
                    raise TrainingError(
                        f"{url} was made with {name}={cut(before[name])}, and this training has "
                        f"{name}={cut(now)}. Give the same data in the same order and the same "
                        "kind of training, or start from scratch without resume."
                    )
            self._load(state)
            run.reporter.emit(events.ResumeEvent(run.step, url))
            if run.world.rank == 0:
                self._event_log.replay(state["told"])
        except GpuPoolError:
            raise
        except Exception as error:  # what torch and the user's modules raise of another state
            raise TrainingError(
                f"{url} is of another network or optimizer, or no whole state of a training "
                f"({problem_of(error)}); give those it was made with, another checkpoint, or "
                "start from scratch without resume."
            ) from None

    def _load(self, state: dict[str, Any]) -> None:
        run, gathered = self._run, state["optimizer"]
        if isinstance(run.options.optimizer, str):
            # Its options are those of now. One of the user's may keep there what it has gathered.
            old, new = gathered["param_groups"], run.optimizer.state_dict()["param_groups"]
            groups = [now | {"params": one["params"]} for now, one in zip(new, old, strict=True)]
            gathered = {**gathered, "param_groups": groups}
        state_dicts.load(run.model, state["model"])
        run.optimizer.load_state_dict(gathered)
        scaler, averaged = state["scaler"], state["ema"]  # None where there is none
        if run.scaler is not None:
            run.scaler.load_state_dict(scaler)
        if run.ema is not None:
            state_dicts.load(run.ema, averaged)
        best = dict(state["judge"]["best"])
        if run.options.objective in best or not best:  # what was best by another one is not
            run.best, run.num_worse = best, state["judge"]["num_worse"]
        saved = NetworkInfo.of_plain(state["network"])
        # What the data ask for now holds; what was measured is not measured again.
        scaling = run.network.normalization or saved.normalization
        run.network = replace(run.network, normalization=scaling, input_shape=saved.input_shape)
        run.reporter.resume_time(state["elapsed_s"])
        last, validation = state["last_step"], state["last_validation"]
        run.reporter.last_step = last and events.StepEvent(**last)
        run.reporter.last_validation = validation and events.ValidationEvent(**validation)
        # Last: what is half of one training is at no step of it.
        vars(run).update({name: state[name] for name in _OF_RUN})
        self._saved_step = run.step


def _find(
    options: TrainingOptions, own: Checkpoints | None, world: World
) -> tuple[str, dict[str, Any]] | None:
    """URL and state of what is resumed, the same on every rank; None to start from scratch."""
    if not options.resume:
        return None
    is_own = options.resume in ("auto", True)
    url = str(options.checkpoint if is_own else options.resume)
    folder, _, name = url.rstrip("/").rpartition("/")
    if name.endswith(".pt") and not is_own:  # one checkpoint
        files = Checkpoints(folder or ".")
    else:  # The first rank's answer holds: another one may already see a newer file.
        files = own if own is not None and is_own else Checkpoints(url)
        name = on_first(world, lambda: (files.load_newest() or ("", {}))[0], "resume: ")
    if name:
        return files.target.name(name), fail_together(world, lambda: files.load(name), "resume: ")
    if options.resume != "auto":
        raise TrainingError(
            f"resume: {files.target.name('')} holds no checkpoint; 'auto' starts from scratch."
        )
    return None


def resuming(options: TrainingOptions, world: World) -> TrainingOptions:
    """The options of another attempt: from its own newest checkpoint, if it has made one."""
    folder = options.checkpoint
    if folder and on_first(world, lambda: bool(Checkpoints(folder).names())):
        return replace(options, resume="auto", overwrite=False)
    return options


def on_first(world: World, work: Callable[[], T], about: str = "") -> T:
    """As `fail_together`, on the first rank alone: elsewhere a folder may be another one."""
    found = fail_together(world, lambda: work() if world.rank == 0 else None, about)
    return world.gather(found)[0]  # type: ignore[no-any-return]


def fail_together(world: World, work: Callable[[], T], about: str = "") -> T:
    """What `work` returns on this rank. If it fails on one, all ranks raise TrainingError."""
    value, problem = None, None
    try:
        value = work()
    except GpuPoolError as error:
        problem = TrainingError(f"{about}{error}")
    # Every rank gets here, so none waits for one that has failed.
    first = next(filter(None, world.gather(problem)), None)
    if first is not None:
        raise first
    return value  # type: ignore[return-value]
