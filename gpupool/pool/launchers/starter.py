"""The starter of this host as the client sees it: warm, or in use by a pool. Runs on the client.

`%load_ext gpupool` starts it (`gpupool/host/starter.py`) in the background, so that torch is
imported by the time it is needed. A pool takes it and gives it back when it is stopped: the next
pool of this notebook finds it warm.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpupool.core.errors import PoolStartError
from gpupool.core.machine.locks import hold_folder
from gpupool.core.machine.processes import command_for, lack_of_processes
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines
from gpupool.core.wire.json_lines import JsonLines, encode

# What is imported, and from where on a target can be forked: see host/starter.py.
# Reading these opens no zmq context. The controller needs no torch, and is up when the engines are.
PRELOADED = (
    "ipyparallel.controller.app",
    "=gpupool.host.controller:main",
    "ipyparallel.engine.app",
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "numpy.random",
    "threadpoolctl",
    "gpupool.core.wire.invoke",
    "torch",
    "gpupool.engine.boot",
    "gpupool.engine.entry",
    "gpupool.engine.output.streams",
    "=gpupool.engine.boot:main",
    # the first error, sync and training are not to wait for these
    "stack_data",
    "gpupool.engine.state_sync.sync",
    "gpupool.core.options.training_options",
    "gpupool.engine.batches.shares",
    "gpupool.engine.metrics.evaluation",
    "gpupool.engine.training.loop",
    "gpupool.engine.inference",
)
# Variables that an interpreter and torch read while they start: a change needs a new starter.
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
)

WARM_S = 600.0  # how long a starter without a pool stays
_PREFIX = "gpupool-pool-"  # of the names of folders
_HELD_AFTER_S = 600.0  # one that is just starting does not hold its folder yet
_REPLY_S = 5.0  # for a starter to react
_IMPORT_S = 60.0  # while it imports torch from a slow disk, and hears nothing
_TAIL_BYTES, _TAIL_LINES = 1 << 14, 20  # of what it says on stderr

_warm: Starter | None = None


class Starter:
    """A running starter and the line to it; `folder` is private, and goes with it.

    `on_event` is called from a background thread with each event; the last one is the end of the
    starter itself.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # the starter's umask does the rest
        self.on_event: Callable[[lines.Event], None] = lambda event: None
        self.num_pools = 0
        self.preloaded = threading.Event()  # it has imported what it needs
        self._client_pid = os.getpid()
        self._read_at_start = _read_at_start()
        self._stderr = os.memfd_create("gpupool-starter")
        arguments = [str(self.folder), str(os.getpid()), str(WARM_S), *PRELOADED]
        try:
            self._process = subprocess.Popen(
                [*command_for("gpupool.host.starter"), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environ.inheritable(os.environ),
                start_new_session=True,  # the notebook's interrupt is not meant for it
            )
        except OSError as error:
            os.close(self._stderr)
            shutil.rmtree(self.folder, ignore_errors=True)
            why = lack_of_processes(str(error)) or str(error)
            raise PoolStartError(f"no process can be started here: {why}.") from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._write_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="gpupool-starter", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def reply_s(self) -> float:
        """How long it may take to react."""
        return _REPLY_S if self.preloaded.is_set() else _IMPORT_S

    @property
    def usable(self) -> bool:
        """Whether it and its folder are there, and it has what the environment says now."""
        is_there = self._process.poll() is None and self.folder.is_dir()
        return is_there and self._read_at_start == _read_at_start()

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it; a child that the notebook forks has no say."""
        return os.getpid() == self._client_pid

    def command(self, command: lines.Command) -> None:
        """Send one command. An event reports a dead starter; here nobody is left to hear.

        One that does not read its commands any more is killed.
        """
        if not self.is_ours:
            return
        data = encode(command)
        with self._write_lock, contextlib.suppress(BrokenPipeError, ValueError):
            assert self._process.stdin is not None
            pipe = self._process.stdin.fileno()
            room = select.poll()
            room.register(pipe, select.POLLOUT)
            while data:
                if not room.poll(self.reply_s * 1000):
                    self._process.kill()
                    return
                data = data[os.write(pipe, data) :]

    def close(self) -> None:
        """End it, and with it all it has started. May be called again."""
        if self.is_ours and self.preloaded.is_set():  # else it would not hear it soon
            self._hang_up()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REPLY_S)
        self.kill()

    def kill(self) -> None:
        """End one that does not react, and all it has started. May be called again."""
        if not self.is_ours:
            return
        self._process.kill()  # its children die with it; no effect when it has ended
        self._process.wait()
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(_REPLY_S)  # it ends what is left

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            events = JsonLines(pipe.fileno(), lines.EVENTS)
            while not events.closed:
                for event in events.read():
                    if isinstance(event, lines.Ready):
                        self.preloaded.set()
                    self.on_event(event)
        status = self._process.wait()
        said = os.pread(
            self._stderr, _TAIL_BYTES, max(0, os.fstat(self._stderr).st_size - _TAIL_BYTES)
        )
        os.close(self._stderr)
        shutil.rmtree(self.folder, ignore_errors=True)
        tail = "\n".join(said.decode(errors="replace").splitlines()[-_TAIL_LINES:])
        self.on_event(lines.Exited(lines.STARTER, status, lack_of_processes(tail), tail))


def warm() -> None:
    """Start one in the background, if none is waiting; returns at once.

    Nobody has to use it: it ends after `WARM_S` seconds without a pool.

    Raises:
        PoolStartError: no process can be started, or no folder made.
    """
    global _warm
    if _warm is None:
        atexit.register(close)
    elif not _warm.usable:
        close()
    with uninterrupted():
        _warm = _warm or Starter()


def take() -> Starter:
    """The starter for a pool, which is its only one until it is given back; see `warm`."""
    global _warm
    warm()
    assert _warm is not None
    starter, _warm = _warm, None
    return starter


def give_back(starter: Starter) -> None:
    """Keep a starter that has no pool any more for the next one."""
    global _warm
    if _warm is None and starter.usable:
        _warm = starter
    else:
        starter.close()


def close() -> None:
    """End the starter that is waiting, if there is one."""
    global _warm
    starter, _warm = _warm, None
    if starter is not None:
        starter.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt wait for the end of a block: it would lose a process that runs already."""
    heeds = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or heeds is None:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heeds)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _remove_abandoned() -> None:
    """Remove the folders of this user's starters that were killed together with their notebook."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and time.time() - found.st_mtime > _HELD_AFTER_S:
                held = hold_folder(folder)  # else a starter has it
                if held is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(held)


def _read_at_start() -> dict[str, str]:
    variables = environ.inheritable(os.environ)
    return {k: v for k, v in variables.items() if k.startswith(_READ_AT_START)}
