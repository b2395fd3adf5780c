"""A process that reads batches for a rank. Runs in processes of its own, children of `main`.

`main` imports what all of them need, once, and forks one for each connection that the rank sends.
It ends when the rank does, and the kernel then ends what it has forked, whatever that is doing.
It has not used the rank's threads, GPUs or tokenizers: so nothing that dislikes a fork meets one.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gpupool.core.machine.processes import die_with, set_process_name
from gpupool.core.wire.pickles import INLINE_BYTES, DataPacker, MemoryFile, Packed, Source, to_wire
from gpupool.data.reading.cpu_loader import Noticed, read_alone
from gpupool.data.reading.pipeline import Reading
from gpupool.data.reading.samples import Draw
from gpupool.data.stores.retry import Counts, counts

NAME = "gpupool:reads"
READY = b"+"
_OURS = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Job:
    """A data set, with what else reading it needs, that tasks call `number` from now on."""

    number: int
    packed: Packed


@dataclass(frozen=True, slots=True)
class Task:
    """A batch to read."""

    number: int
    indices: list[int]
    draw: Draw | None
    skip: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the user's, where an error was."""

    path: str
    name: str
    qualname: str
    line: int
    module: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What reading a batch has raised: pickled, as far as it can be, and in words."""

    pickled: bytes
    words: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A batch that was read, or why not; `printed` is (stdout, stderr)."""

    batch: Packed | Failure
    counts: Counts
    printed: tuple[str, str]


def main() -> None:
    """Fork a process for each connection that comes over the socket whose descriptor is given."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    # An interrupt of the terminal is meant for the notebook, which decides about the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps those that end
    set_process_name(NAME)
    gc.freeze()  # a collection in a child would copy the pages that it shares
    server = os.getpid()
    asked.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1, 1)
        if not message:  # the rank has ended, or wants no more
            os._exit(0)
        if os.fork() == 0:
            die_with(server)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked.close()
            try:
                _work(Connection(descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _work(connection: Connection) -> None:
    """Read what is asked for, until the rank closes the connection."""
    torch.set_num_threads(1)  # there are as many processes as cores
    jobs: dict[int, tuple[Any, Any, Noticed]] = {}
    # The same for all batches: the kernel takes much longer to find pages than to copy to them.
    memory = MemoryFile()
    while True:
        try:
            asked = pickle.loads(connection.recv_bytes())  # nosec B301 # from this process's rank
        except EOFError:
            return
        if isinstance(asked, Job):
            jobs[asked.number] = *Source(asked.packed).load(), Noticed()
            continue
        connection.send_bytes(pickle.dumps(_answer(asked, memory, *jobs[asked.number])))


def _answer(
    task: Task, memory: MemoryFile, dataset: Any, settings: dict[str, Any], noticed: Noticed
) -> Done:
    before = counts.snapshot()
    stdout, stderr = io.StringIO(), io.StringIO()
    packed: Packed | Failure
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            reading = Reading(draw=task.draw, skip=task.skip, **settings)
            batch = read_alone(dataset, task.indices, reading, noticed)  # type: ignore[arg-type]
            packer = DataPacker()
            packer.dump(batch)
            file = memory if packer.num_bytes > INLINE_BYTES else None
            packed = to_wire(packer.stream(), packer.buffers, file)
        except BaseException as error:  # raised again by the rank
            packed = _failure(error)
    printed = stdout.getvalue(), stderr.getvalue()
    return Done(packed, counts.snapshot() - before, printed)


def _failure(error: BaseException) -> Failure:
    packer = DataPacker()
    try:
        packer.dump(error)
        pickle.loads(packer.stream(), buffers=packer.buffers)  # nosec B301 # made just now
        pickled = pickle.dumps(to_wire(packer.stream(), packer.buffers, None))
    except Exception:  # its class may want arguments of its own
        pickled = b""
    words = "".join(traceback.format_exception_only(error)).strip()
    return Failure(pickled, words, tuple(_frames(error)))


def _frames(error: BaseException) -> Sequence[Frame]:
    """Where it was raised, from the first line on that is not ours."""
    found = [
        Frame(
            code.co_filename,
            code.co_name,
            code.co_qualname,
            line,
            frame.f_globals.get("__name__", ""),
        )
        for frame, line in traceback.walk_tb(error.__traceback__)
        for code in [frame.f_code]
    ]
    ours = [number for number, one in enumerate(found) if one.path.startswith(_OURS)]
    first = next((i for i in range(len(found)) if i not in ours), len(found))
    return found[first:]
