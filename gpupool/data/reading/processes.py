"""The workers that read a data set of the user's, by torch's DataLoader. Runs on engines; torch.

They are forked, so a data set of any class is there as it is, and nothing of it is copied. They are
in the process group of the rank, which the starter kills when the rank has ended.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from gpupool.core.errors import DataError
from gpupool.core.machine.limits import little_shared_memory
from gpupool.data.reading.batches import Collate, Reading, Rows
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.threads import Reads, use_one_core
from gpupool.data.reading.trees import pinned

_OURS = str(Path(__file__).parents[2])
_END_S = 1.0
_SMALL_BYTES = 1 << 16
# Workers that wait are more than there are cores; and every user of torch forks beside its threads.
_EXPECTED = ("This DataLoader will create", ".*use of fork\\(\\) may lead to deadlocks")
_Task = tuple[Indices, Draw | None, bool]


class Workers:
    """`num` processes that read a data set, and make batches of it, until `close`."""

    def __init__(self, dataset: Any, num: int, collate: Collate | None) -> None:
        if said := little_shared_memory():
            raise DataError(f"{said} Or choose workers=0.", "shared memory")
        self._tasks: list[_Task] = []
        with warnings.catch_warnings():
            for expected in _EXPECTED:
                warnings.filterwarnings("ignore", expected)
            self._loader: DataLoader[Any] = DataLoader(
                _Answers(dataset, collate),
                batch_size=None,
                sampler=self._tasks,
                num_workers=num,
                worker_init_fn=_begin,
                multiprocessing_context="fork",
                persistent_workers=True,
                generator=torch.Generator(),  # the rank's own gives the noise of its steps
            )
            self._processes = iter(self._loader)._workers  # type: ignore[attr-defined]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()  # to which torch's workers end at once, also those that hang
        for process in self._processes:
            process.join(_END_S)

    def read(self, batches: Sequence[Indices], reading: Reading) -> Reads:
        """The batches, in order. Raises what the data set raises; DataError if a worker ends."""
        self._tasks[:] = [(indices, reading.draw, reading.skip) for indices in batches]
        answers = iter(self._loader)
        # The cores are the workers': a copy by many threads would wait until each has got one.
        with use_one_core():
            for _ in batches:
                yield self._next(answers, reading.pin)

    def _next(self, answers: Iterator[bytes], pin: bool) -> Any:
        try:
            sent = next(answers)
        except (RuntimeError, EOFError, OSError) as error:  # the data set's come as answers
            raise DataError(
                "a worker that reads samples for this rank was killed, or has ended itself; "
                "most often memory has run out: choose fewer workers=, or a smaller batch_size "
                f"({error})",
                "worker died",
            ) from None
        found = pickle.loads(sent)  # nosec B301 # from our own process
        if isinstance(found, _Raised):
            raise found.error()
        return pinned(found) if pin else found


def unread(dataset: Any) -> Any:
    """A data set as it is now, for workers: files that it opens when it is read are not theirs."""
    if not isinstance(dataset, Dataset):
        return dataset
    try:
        same = copy.copy(dataset)
        if isinstance(dataset, ConcatDataset):
            same.datasets = [unread(part) for part in dataset.datasets]  # type: ignore[attr-defined]
        for name, part in vars(dataset).items():
            if isinstance(part, Dataset):
                setattr(same, name, unread(part))
    except Exception:  # a class that is not to be copied
        return dataset
    return same


def _begin(worker: int) -> None:
    # An interrupt of the terminal is meant for the notebook, which decides about the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Said for the user, tokenizers do not warn of the fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class _Answers(Dataset[Any]):
    """What a worker gives for a task: a pickled batch, or an error."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._rows: Rows | None = None

    def __getitem__(self, task: _Task) -> bytes:
        indices, draw, skip = task
        try:
            if self._rows is None:  # a copy opens files of its own, where its class does that
                self._rows = Rows(unread(self._dataset))
            batch = self._rows.batch(indices, Reading(draw, skip, self._collate))
            try:
                file = io.BytesIO()
                _Pickler(file).dump(batch)
                return file.getvalue()
            except Exception:  # a class that only the notebook has
                return bytes(cloudpickle.dumps(batch))
        except BaseException as error:  # raised again by the rank
            return pickle.dumps(_Raised.of(error))


class _Pickler(ForkingPickler):
    """Puts tensors into shared memory, but for small ones, as labels: the rank has to ask this
    process for each piece of it, and a worker that computes is slow to answer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and not value.requires_grad:
            # Such as bfloat16, which numpy lacks, and sparse ones, which have no number of bytes.
            with contextlib.suppress(TypeError, RuntimeError):
                if value.nbytes <= _SMALL_BYTES:
                    return torch.from_numpy, (value.numpy(),)
        return NotImplemented


class _Raised(NamedTuple):
    """An error, pickled, and where it was raised: from the first frame on that is not ours."""

    pickled: bytes
    places: list[tuple[str, str, int, str]]  # file, function, line, module

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        places: list[tuple[str, str, int, str]] = []
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if places or not code.co_filename.startswith(_OURS):
                module = frame.f_globals.get("__name__", "")
                places.append((code.co_filename, code.co_name, line, module))
        try:
            sent = bytes(cloudpickle.dumps(error))
            pickle.loads(sent)  # nosec B301 # made just now
        except Exception:  # its class may want arguments of its own
            words = "".join(traceback.format_exception_only(error)).strip()
            sent = bytes(cloudpickle.dumps(DataError(words, "worker")))
        return cls(sent, places)

    def error(self) -> BaseException:
        """It, as if it had been raised here."""
        error: BaseException = pickle.loads(self.pickled)  # nosec B301 # from our own process
        found: TracebackType | None = None
        for path, name, line, module in reversed(self.places):
            code = compile("import sys\nframe = sys._getframe()", path, "exec")
            in_line = b"\xef\0" * len(code.co_code)  # all of it, without a column
            code = code.replace(
                co_name=name, co_qualname=name, co_firstlineno=line, co_linetable=in_line
            )
            names: dict[str, Any] = {"__name__": module}
            exec(code, names)  # noqa: S102 - our own line # nosec B102 # our own line
            found = TracebackType(found, names["frame"], names["frame"].f_lasti, line)
        return error.with_traceback(found)
