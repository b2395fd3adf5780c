"""Checkpoints below a URL: complete or not there, written in the background. Runs on engines.

A file is what `torch.save` makes, followed by a seal: its length and its SHA-256. `torch.load`
reads it as it is. A file that was cut short, or that another program has made, has no seal that
fits, and is not taken for a checkpoint. It is never written over nor removed: its name is another
one's, and the folder may be the user's own. Those of another training are removed where the user
asks for it, when the first of this one is complete.
"""

from __future__ import annotations

import hashlib
import io
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpupool.core.errors import DataError, DataNotFoundError, TrainingError
from gpupool.core.progress import progress
from gpupool.core.wire.state_dicts import save
from gpupool.data.stores.writable import Target
from gpupool.engine.checkpoint.snapshot import Snapshot
from gpupool.engine.checkpoint.weights import read_without_code

_NAME = re.compile(r"step-([0-9]{8,})\.pt")
_MAGIC = b"gpupool checkpoint 1\n"
_SEAL_BYTES = len(_MAGIC) + 8 + 32


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is complete."""

    step: int
    name: str
    url: str


@dataclass(frozen=True, slots=True)
class _Job:
    step: int
    state: dict[str, Any]
    why_not: Callable[[], str]


class Checkpoints:
    """The checkpoints of one training, `step-00000037.pt` and so on, below `url`.

    One whose name is taken gets a zero more in it.

    Args:
        url: a folder, of any protocol that fsspec knows; it is made if it is not there.
        keep: so many of the newest are kept; older ones are removed when a new one is complete.
            These are of this training: it has written them, or `check` has found them.
    """

    def __init__(self, url: str, keep: int = 2) -> None:
        self._target = Target(url)
        self._keep = keep
        self._snapshot = Snapshot()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._own: set[str] = set()  # what may be removed
        self._replaced: set[str] = set()  # of another training: goes when there is a new one
        self._newest_step = 0  # of what is being written, or was last
        self._written: list[Written] = []
        self._failed: list[DataError] = []
        self._lock = threading.Lock()
        self.passed_over: list[str] = []
        """Names of the damaged checkpoints that `load_newest` has met."""

    def check(self, step: int = 0, overwrite: bool = False) -> None:
        """Write something there and read it back; what comes is later than `step`.

        With `overwrite` complete ones of a later step are removed when the first new one is
        complete.

        Raises TrainingError, in one sentence, if checkpoints cannot be kept there, or if there are
        complete ones of a later step, which new ones would be mixed up with.
        """
        try:
            self._target.check()
            own = [name for name in self.names() if self._is_sealed(name)]
            later = [name for name in own if step_of(name) > step and self._is_whole(name)]
        except DataError as error:
            raise TrainingError(f"checkpoint: {error}") from None
        if overwrite:
            self._replaced = set(later)
        elif later:
            raise TrainingError(
                f"checkpoint: {self._target.name(later[-1])} is there already, and this training "
                f"begins after step {step}. resume='auto' continues from it; overwrite=True starts "
                "from scratch and removes it later; or give another folder."
            )
        self._own.update(set(own) - self._replaced)

    def names(self) -> list[str]:
        """The files that are named as checkpoints, the newest last. Raises DataError."""
        found = [name for name in self._target.names() if _NAME.fullmatch(name)]
        return sorted(found, key=step_of)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        fixed: Mapping[str, Any] | None = None,
        wait: bool = False,
        why_not: Callable[[], str] = lambda: "",
    ) -> None:
        """Copy the tensors in `state` to the CPU, and have a thread write them.

        Waits for the one before, should that not be complete yet. What is in `fixed` is saved with
        `state`, and not copied: it must not change any more. `why_not` is asked when the copy is
        whole: unless it says "", nothing is written, for that reason.

        With `wait` it is complete when this returns; raises DataError if it cannot be written.
        Otherwise `news` has it.
        """
        self._wait()  # the thread still reads the snapshot's buffers
        try:
            copy = self._snapshot.take(state) | dict(fixed or {})
        except Exception as error:  # what is no tensor may be of any class
            self._failed_with(_of_state(self.url(_name(step)), error), heard=wait)
            return
        self._idle.clear()
        job = _Job(step, copy, why_not)
        self._newest_step = step
        if wait:
            with progress(_saving(step)):
                self._write(job, heard=True)
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="gpupool-checkpoint", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def news(self) -> tuple[list[Written], list[DataError]]:
        """What has become complete since the last call, and what has failed."""
        with self._lock:
            written, self._written = self._written, []
            failed, self._failed = self._failed, []
        return written, failed

    def load_newest(self) -> tuple[str, dict[str, Any]] | None:
        """Name and state of the newest complete checkpoint; None if there is none.

        Damaged ones are passed over, see `passed_over`. Raises DataError if they cannot be read, or
        the newest holds another thing than the state of a training.
        """
        self.passed_over = []
        for name in reversed(self.names()):
            content = unsealed(self._target.get(name))
            if content is not None:
                return name, _loaded(content, self.url(name))
            self.passed_over.append(name)
        return None

    def load(self, name: str | None = None) -> dict[str, Any]:
        """The state in the checkpoint of this name, or in the newest; tensors on the CPU.

        Raises TrainingError if there is none, or if it is damaged; DataError if it cannot be read,
        or holds another thing than the state of a training.
        """
        if name is None:
            found = self.load_newest()
            if found is None:
                raise TrainingError(f"{self._target.name('')} holds no checkpoint; check the URL.")
            return found[1]
        content = unsealed(self._target.get(name))
        if content is None:
            raise TrainingError(
                f"{self._target.name(name)} is cut short, damaged, or no checkpoint of gpupool; "
                "take another one."
            )
        return _loaded(content, self.url(name))

    def url(self, name: str) -> str:
        """The printable URL of a checkpoint."""
        return self._target.name(name)

    def is_written(self, within_s: float) -> bool:
        """Whether the one that was begun last is complete, or has failed, after waiting so long."""
        return self._idle.wait(within_s)

    def finish(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _wait(self) -> None:
        """Wait for the thread."""
        if not self._idle.is_set():
            with progress(_saving(self._newest_step)):
                self._idle.wait()

    def _is_sealed(self, name: str) -> bool:
        """Whether it ends with the seal of a checkpoint of this length; reads its end alone."""
        end, size = self._target.end(name, _SEAL_BYTES)
        return end.startswith(_sealing(size - _SEAL_BYTES)) if size >= _SEAL_BYTES else False

    def _is_whole(self, name: str) -> bool:
        return unsealed(self._target.get(name)) is not None

    # ---- in the thread -------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._write(job, heard=False)

    def _write(self, job: _Job, *, heard: bool) -> None:
        """Write a checkpoint and remove older ones; `heard`: the caller hears of errors."""
        name = _name(job.step)
        try:
            self._snapshot.wait()  # here, not in `save`: the training does not wait for the copy
            if reason := job.why_not():
                raise DataError(f"{self.url(name)} was not written: {reason}", "unfinished")
            data = sealed(job.state)
            if name in self._replaced and self._is_still_sealed(name):
                self._target.put(name, data)  # in the place of the older one, at once
            # Any other file that is there may be another program's: nothing is written over.
            else:
                while not self._target.put(name, data, is_new=True):
                    name = name.replace("-", "-0")  # the step is the same
            self._own.add(name)
            self._remove_replaced(name)
            with self._lock:
                self._written.append(Written(job.step, name, self._target.name(name)))
            self._remove_old(job.step)  # only now: there is always a complete one
        except Exception as error:  # not only of the store: an optimizer's state may hold anything
            failure = error if isinstance(error, DataError) else _of_state(self.url(name), error)
            self._failed_with(failure, heard=heard)
        finally:
            self._idle.set()

    def _failed_with(self, failure: DataError, *, heard: bool) -> None:
        if heard:
            raise failure from None
        with self._lock:
            self._failed.append(failure)

    def _remove_replaced(self, new: str) -> None:
        """Remove the checkpoints of another training, now that there is one of this one."""
        for name in sorted(self._replaced - {new}):
            # Hours may have passed since they were found: another program may have the name now.
            if self._is_still_sealed(name):
                self._target.remove(name)
        self._replaced.clear()

    def _is_still_sealed(self, name: str) -> bool:
        try:
            return self._is_sealed(name)
        except DataNotFoundError:  # somebody else has removed it
            return False

    def _remove_old(self, step: int) -> None:
        written = sorted((name for name in self._own if step_of(name) <= step), key=step_of)
        for name in written[: -self._keep]:
            self._target.remove(name)
            self._own.discard(name)


def _saving(step: int) -> str:
    return f"saving the checkpoint of step {step}"


def _name(step: int) -> str:
    return f"step-{step:08}.pt"


def step_of(name: str) -> int:
    """The step in the name of a checkpoint.

    >>> step_of("step-00000037.pt")
    37
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(name)
    return int(found[1])


def sealed(state: Mapping[str, Any]) -> bytes:
    """A state as the bytes of a checkpoint. Raises TrainingError if none could be read again."""
    buffer = io.BytesIO()
    save(dict(state), buffer)
    content = buffer.getbuffer()
    seal = _sealing(len(content)) + hashlib.sha256(content).digest()
    content.release()  # a buffer that is being viewed cannot grow
    buffer.seek(0, io.SEEK_END)
    buffer.write(seal)
    return buffer.getvalue()


def _loaded(content: memoryview, url: str) -> dict[str, Any]:
    found = read_without_code(content, url, "state of a training")
    if not isinstance(found, dict):
        raise DataError(
            f"{url} holds a {type(found).__name__}, not the state of a training",
            "no checkpoint",
            url=url,
        )
    return found


def _of_state(url: str, error: Exception) -> DataError:
    text = str(error).split("\n")[0]
    return DataError(
        f"{url}: the state cannot be saved ({type(error).__name__}: {text})", "cannot save", url=url
    )


def unsealed(data: bytes) -> memoryview | None:
    """What `torch.save` made, of the bytes of a checkpoint; None if its seal does not fit."""
    content, seal = memoryview(data)[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    expected = _sealing(len(content)) + hashlib.sha256(content).digest()
    return content if seal == expected else None


def _sealing(num_bytes: int) -> bytes:
    return _MAGIC + num_bytes.to_bytes(8, "big")
