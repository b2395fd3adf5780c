"""The processes that read for this rank, where threads would wait for each other. Runs on engines.

They are forked by a server that has imported torch (`worker.py`), and so come up at once. The data
set travels pickled as in cells, by value where the notebook has defined its class. What is large
in it lies in memory that all of them map. A batch comes back in memory that its process uses again
for its next one.

Every thread that waits for a batch has a process to itself while it does. If one is killed, its
connection ends; if the rank is, the server's does, and the kernel ends all that it has forked.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import weakref
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from gpupool.core.errors import DataError
from gpupool.core.machine.processes import command_for
from gpupool.core.wire.pickles import DataPacker, MemoryFile, Packed, Source, to_wire
from gpupool.data.loading.worker import READY, Done, Failure, Frame, Job, Task
from gpupool.data.reading.collate import Batch
from gpupool.data.reading.pipeline import Reading
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import pinned
from gpupool.data.stores.retry import counts
from gpupool.data.stores.threads import start_threads

_MODULE = "gpupool.data.loading.worker"
_NO_PLACE = -1  # in a line: then its number counts, not that of an instruction
# One thread each, as there are many: what libraries read when they are loaded.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Parcel:
    """A data set as it was when this was made, for processes: opened files would not travel.

    Its large arrays are not copied before a process asks for them.
    """

    def __init__(self, dataset: Any, settings: dict[str, Any]) -> None:
        self._packer = DataPacker()
        self._packer.dump((dataset, settings))
        self._memory: MemoryFile | None = None
        self._packed: Packed | None = None

    def packed(self) -> Packed:
        """In memory that the processes map."""
        if self._packed is None:
            self._memory = MemoryFile()
            self._packed = to_wire(self._packer.stream(), self._packer.buffers, self._memory)
        return self._packed


@dataclass
class _Process:
    connection: Connection
    sent: set[int] = field(default_factory=set)  # the jobs it has


class Processes:
    """`num` processes that read for this rank, from when `is_ready` until `close`."""

    def __init__(self, num: int) -> None:
        self.num, self.is_ready, self.has_failed = num, False, False
        self._parcels: list[Parcel] = []  # a job's number is its place here
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        ours, theirs = socket.socketpair()
        self._server = subprocess.Popen(
            [*command_for(_MODULE), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        theirs.close()
        # Also if nobody calls it: the server ends with its connection.
        self.close = weakref.finalize(self, _end, self._server, ours)
        start_threads("gpupool-processes", [lambda: self._start(ours)])

    def _start(self, server: socket.socket) -> None:
        """Wait for the server, in a thread of its own, and have it fork."""
        try:
            if server.recv(1) != READY:
                raise OSError("it has ended")
            for _ in range(self.num):
                here, there = socket.socketpair()
                with there:
                    socket.send_fds(server, [READY], [there.fileno()])
                self._idle.put(_Process(Connection(here.detach())))
            self.is_ready = True
        except OSError:  # no more processes may be started here: threads read then
            self.has_failed = True

    def read(self, parcel: Parcel, indices: Indices, reading: Reading) -> Batch | None:
        """A batch, read by whichever process is idle.

        Raises what the data set raises, with the user's lines alone; DataError if the process has
        ended.
        """
        if len(indices) == 0:
            return None
        process = self._idle.get()
        try:
            done, batch = self._ask(process, parcel, indices, reading)
        finally:
            self._idle.put(process)  # one that has ended says so again
        if any(done.printed):
            sys.stdout.write(done.printed[0])
            sys.stderr.write(done.printed[1])
        took = asdict(done.counts)
        reason = took.pop("last_reason")
        if any(took.values()):
            counts.add(**took, reason=reason)
        if batch is None or not reading.pin:
            return batch
        return batch._replace(inputs=pinned(batch.inputs), targets=pinned(batch.targets))

    def _ask(
        self, process: _Process, parcel: Parcel, indices: Indices, reading: Reading
    ) -> tuple[Done, Batch | None]:
        if parcel not in self._parcels:
            self._parcels.append(parcel)
        number = self._parcels.index(parcel)
        connection = process.connection
        try:
            if number not in process.sent:
                connection.send_bytes(pickle.dumps(Job(number, parcel.packed())))
                process.sent.add(number)
            places = [int(index) for index in indices]
            connection.send_bytes(pickle.dumps(Task(number, places, reading.draw, reading.skip)))
            done: Done = pickle.loads(connection.recv_bytes())  # nosec B301 # from our own process
        except (EOFError, OSError):
            raise DataError(
                "a process that read samples for this rank was killed, or has ended itself; most "
                "often memory has run out: choose fewer workers=, or a smaller batch_size",
                "worker died",
            ) from None
        if isinstance(done.batch, Failure):
            raise _error_of(done.batch)
        return done, Source(done.batch, is_reused=True).load()


def _environment() -> dict[str, str]:
    """That of a process that reads: modules are found where this process finds them."""
    chosen = dict.fromkeys(_ONE_THREAD, "1") | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
    }
    # Said for the user, tokenizers do not warn; with a process for each core it is right, too.
    return {"TOKENIZERS_PARALLELISM": "false", **os.environ, **chosen}


def _end(server: subprocess.Popen[bytes], ours: socket.socket) -> None:
    server.kill()
    server.wait()
    ours.close()


def _error_of(failure: Failure) -> BaseException:
    """What the process has raised, as if it had been raised here."""
    error: BaseException
    if failure.pickled:
        error = Source(pickle.loads(failure.pickled)).load()  # nosec B301 # from our own process
    else:
        error = DataError(failure.words, "worker")
    traceback: TracebackType | None = None
    for frame in reversed(failure.frames):
        traceback = TracebackType(traceback, _frame(frame), _NO_PLACE, frame.line)
    return error.with_traceback(traceback)


def _frame(of: Frame) -> FrameType:
    """A frame of this file, function and module, which tracebacks show as the one that was."""
    code = compile("import sys\nframe = sys._getframe()", of.path, "exec")
    names: dict[str, Any] = {"__name__": of.module}
    named = code.replace(co_name=of.name, co_qualname=of.qualname)
    exec(named, names)  # noqa: S102 - our own line # nosec B102 # our own line
    frame: FrameType = names.pop("frame")
    return frame
