"""The host agent as the client sees it: warm, or in use by a pool. Runs on the client.

`%load_ext gpupool` starts the agent (`gpupool/host/agent.py`) in the background, so that torch is
imported by the time it is needed. A pool takes it and gives it back when it is stopped: the next
pool of this notebook finds it warm.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import resource
import select
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from gpupool.core.errors import PoolStartError
from gpupool.core.machine.locks import hold_folder
from gpupool.core.machine.processes import command_for
from gpupool.core.wire import agent as lines
from gpupool.core.wire import environ
from gpupool.core.wire.json_lines import JsonLines, encode

# What the fork server imports, and from where on it can fork a target: see host/forkserver.py.
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
# Variables that an interpreter and torch read while they start: a change of one needs a new agent.
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

WARM_S = 600.0  # how long an agent without a pool stays
_PREFIX = "gpupool-pool-"  # of the names of folders
_HELD_AFTER_S = 600.0  # an agent that is just starting does not hold its folder yet
_STOP_TIMEOUT_S = 5.0
_LIMITS = (
    (resource.RLIMIT_NOFILE, 0, 128, "open files", "ulimit -n"),
    (resource.RLIMIT_NOFILE, 1, 160, "open files", "ulimit -Hn"),  # which the controller takes
    (resource.RLIMIT_NPROC, 0, 64, "processes", "ulimit -u"),  # all of a user's; not for root
)


@dataclass(frozen=True)
class Gone:
    """The agent itself has ended; the last event."""

    status: int


Event = lines.Event | Gone
_warm: HostAgent | None = None


class HostAgent:
    """A running agent and the line to it; `folder` is private, and goes with the agent.

    `on_event` is called from a background thread with each event.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # the agent's umask does the rest
        self.on_event: Callable[[Event], None] = lambda event: None
        self.num_pools = 0
        self._client_pid = os.getpid()
        self._read_at_start = _read_at_start()
        arguments = [str(self.folder), str(os.getpid()), str(WARM_S), *PRELOADED]
        self._process = subprocess.Popen(
            [*command_for("gpupool.host.agent"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ.inheritable(os.environ),
            start_new_session=True,  # the notebook's interrupt is not meant for it
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._write_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_events, name="gpupool-agent", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

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
        """Send one command. An event reports a dead agent; here nobody is left to hear.

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
                if not room.poll(_STOP_TIMEOUT_S * 1000):
                    self._process.kill()
                    return
                data = data[os.write(pipe, data) :]

    def close(self) -> None:
        """End it, and with it all it has started. May be called again."""
        if not self.is_ours:
            return
        self._hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End one that does not react, and all it has started. May be called again."""
        if not self.is_ours:
            return
        self._process.kill()  # its children die with it; no effect when it has ended
        self._process.wait()
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(_STOP_TIMEOUT_S)  # it ends what is left

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            events = JsonLines(pipe, lines.EVENTS)
            while not events.closed:
                for event in events.read():
                    self.on_event(event)
        status = self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.on_event(Gone(status))


def warm() -> None:
    """Start an agent in the background, if none is waiting; returns at once.

    Nobody has to use it: it ends after `WARM_S` seconds without a pool.
    """
    global _warm
    if _warm is None:
        atexit.register(close)
    elif not _warm.usable:
        close()
    if _warm is None:
        _warm = _start()


def _remove_abandoned() -> None:
    """Remove the folders of this user's agents that were killed together with their notebook."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and time.time() - found.st_mtime > _HELD_AFTER_S:
                held = hold_folder(folder)  # else an agent has it
                if held is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(held)


def _start() -> HostAgent:
    """Start an agent, or none where the user interrupts meanwhile."""
    # An interrupt is raised in the main thread alone. In the middle of `Popen` it would lose a
    # process that runs already, and IPython's last traceback would hold the line to it open. The
    # locks of a Future or a Thread would stay held where it strikes within them: nothing in Python
    # is waited for here.
    started: list[HostAgent | BaseException] = []
    is_done: SimpleQueue[None] = SimpleQueue()
    abandoned: list[bool] = []

    def end_if_abandoned() -> None:
        if abandoned and started and isinstance(started[0], HostAgent):
            started[0].kill()

    def start() -> None:
        try:
            started.append(HostAgent())
        except BaseException as error:  # raised where it is waited for
            started.append(error)
        is_done.put(None)
        end_if_abandoned()

    try:
        _thread.start_new_thread(start, ())
        is_done.get()
        (result,) = started
        if isinstance(result, BaseException):
            raise result
        return result
    except BaseException:
        # Both threads first write and then look, so that one of them ends the agent at least.
        abandoned.append(True)
        end_if_abandoned()
        raise


def take() -> HostAgent:
    """The agent for a pool, which is its only one until it is given back.

    Raises PoolStartError where no pool could start.
    """
    global _warm
    _require_surroundings()
    warm()
    assert _warm is not None
    agent, _warm = _warm, None
    return agent


def _require_surroundings() -> None:
    for kind, which, needed, what, command in _LIMITS:
        limit = resource.getrlimit(kind)[which]
        is_free = limit == resource.RLIM_INFINITY or (command == "ulimit -u" and not os.geteuid())
        if limit < needed and not is_free:
            raise PoolStartError(
                f"{limit} {what} are allowed here, and a pool of two ranks needs {needed}: raise "
                f"the limit with `{command}` where the notebook is started.",
                "limit",
            )
    folder = tempfile.gettempdir()
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise PoolStartError(
            f"the name of the folder for temporary files, {folder!r}, is no UTF-8 here, and "
            "torch cannot open files there: set TMPDIR to another one, or LC_ALL to C.UTF-8.",
            "folder name",
        ) from None


def give_back(agent: HostAgent) -> None:
    """Keep an agent that has no pool any more for the next one."""
    global _warm
    if _warm is None and agent.usable:
        _warm = agent
    else:
        agent.close()


def close() -> None:
    """End the agent that is waiting, if there is one."""
    global _warm
    agent, _warm = _warm, None
    if agent is not None:
        agent.close()


def _read_at_start() -> dict[str, str]:
    variables = environ.inheritable(os.environ)
    return {k: v for k, v in variables.items() if k.startswith(_READ_AT_START)}
