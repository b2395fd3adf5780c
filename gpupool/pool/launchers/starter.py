"""Starters as the client sees them: the line to one, and that of this host, warm or in use.

Runs on the client. Commands go to a starter's stdin, events come from its stdout. `%load_ext
gpupool` starts one (`gpupool/host/starter.py`) in the background, so that torch is imported by the
time it is needed. A pool takes it and releases it when it is stopped, warm for the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpupool.core.machine.processes import command_for
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines

# What is imported before an engine can be forked: see host/starter.py. Reading these opens no zmq
# context. The controller, which needs no torch, is forked before, and is up when the engines are.
NEEDED = (
    "ipyparallel.controller.app",
    "gpupool.host.controller",
    "ipyparallel.engine.app",
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "numpy.random",
    "torch",
    "gpupool.engine.output.streams",
    "gpupool.engine.boot",
)
# The first error and training are not to wait for these.
LATE = (
    "stack_data",
    "gpupool.engine.training.loop",
    "gpupool.engine.jobs",
)
# Variables that an interpreter and torch read while they start: a change needs a new starter.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH")

_WARM_S = 600.0  # how long a starter without a pool stays
ARGUMENTS = (str(_WARM_S), ",".join(NEEDED), ",".join(LATE))  # behind its place

_END_S = 5.0  # for a starter to end all it has started
_MOST_BYTES, _TAIL_LINES = 1 << 20, 20  # of what it says on stderr

_warm: Starter | None = None


class Line:
    """A running starter, or what stands before its line on another host: ssh, srun."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._on_event: Callable[[lines.Line], None] = lambda event: None
        self.preloaded = threading.Event()  # it has imported what it needs
        self._client_pid = os.getpid()
        self._stderr = os.memfd_create("gpupool-starter")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            start_new_session=True,  # the notebook's interrupt is not meant for it
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self._write_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="gpupool-starter", daemon=True)

    def listen(self, on_event: Callable[[lines.Line], None]) -> None:
        """Call `on_event` from a background thread with each event from now on; nothing is read
        before. The last one is the end of the starter itself."""
        self._on_event = on_event
        if self._reader.ident is None:
            self._reader.start()

    def command(self, command: lines.Line) -> None:
        """Send one command. An event reports a dead starter; here nobody is left to hear."""
        with self._write_lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._pipe.write(lines.encode(command))
            self._pipe.flush()

    def kill(self) -> None:
        """End it without a word, which is reported."""
        self._process.kill()

    @property
    def is_ours(self) -> bool:  # a child that the notebook forks has no say
        return os.getpid() == self._client_pid

    def close(self) -> None:
        """End it, and with it all it has started, also if it does not react."""
        if not self.is_ours:
            return
        with self._write_lock, contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        if self.preloaded.is_set():  # else it would not hear it soon
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._process.kill()  # its children die with it; no effect when it has ended
        self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(_END_S)  # it ends what is left

    def release(self) -> None:
        """Its pool has ended, and nothing else runs there."""
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                event = lines.decode(line)
                if isinstance(event, lines.Ready):
                    self.preloaded.set()
                if event is not None:
                    self._on_event(event)
        status = self._process.wait()
        said = os.pread(self._stderr, _MOST_BYTES, 0).decode(errors="replace")
        os.close(self._stderr)
        tail = "\n".join(said.splitlines()[-_TAIL_LINES:])
        self._on_event(lines.Exited(lines.STARTER, status, "", tail))


class Starter(Line):
    """A running starter of this host; `folder` is private, and goes with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpupool-pool-"))  # for this user alone
        self._read_at_start = _read_at_start()
        command = command_for("gpupool.host.starter")
        place = [str(self.folder), str(os.getpid())]
        super().__init__([*command, *place, *ARGUMENTS], environ.inheritable(os.environ))
        self.listen(lambda event: None)

    @property
    def is_usable(self) -> bool:
        """Whether it and its folder are there, and it has what the environment says now."""
        is_there = self._process.poll() is None and self.folder.is_dir()
        return is_there and self._read_at_start == _read_at_start()

    def _read(self) -> None:
        super()._read()
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """Keep it for the next pool."""
        global _warm
        self.listen(lambda event: None)  # it would keep this pool in memory
        if _warm is None and self.is_usable:
            _warm = self
        else:
            self.close()


def warm() -> None:
    """Start one in the background, if none is waiting; it ends after `_WARM_S` without a pool."""
    global _warm
    if _warm is None:
        atexit.register(close)
    elif not _warm.is_usable:
        close()
    with uninterrupted():
        _warm = _warm or Starter()


def take() -> Starter:
    """The starter for a pool, which is its only one until that releases it."""
    global _warm
    warm()
    starter, _warm = _warm, None
    assert starter is not None
    return starter


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


def _read_at_start() -> dict[str, str]:
    variables = environ.inheritable(os.environ)
    return {k: v for k, v in variables.items() if k.startswith(_READ_AT_START)}
