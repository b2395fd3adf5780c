"""The starter: parent of the controller and of every engine of one machine. Runs on the host.

Started as `starter FOLDER CLIENT_PID WARM_S NEEDED LATE`, it imports once what every engine needs,
and then forks them. NEEDED and LATE name modules, with commas. What is in a module can be forked as
soon as that is imported, and anything when all that is needed is; the others are imported while
nobody asks for anything. Commands come on stdin and events go to stdout, one a line
(`gpupool/core/wire/starter.py`), whatever stands between.

On another host than the notebook's CLIENT_PID is 0, and in the place of FOLDER, which it makes
itself, stands the network of the hosts, or "".

It serves one pool at a time, and ends when none has been open for WARM_S seconds. stdin is the
lifeline: when it closes or the client dies, by whatever means, or has not pinged for 30 seconds
over there, all that was started is killed and FOLDER, which holds keys, removed. Should the starter
itself be killed, the kernel ends its children (PR_SET_PDEATHSIG).

One thread, and nothing here may open a zmq context or touch CUDA: none of that survives a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from gpupool.core.machine import network
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.limits import num_usable_cores
from gpupool.core.machine.locks import ENDING_STARTER, STARTER, DeviceLocks, lock_folder
from gpupool.core.machine.processes import die_with, set_process_name, versions
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines
from gpupool.host.endings import OutOfMemoryWatch, cause_of_end, log_tail

STOP_GRACE_S = 0.4  # from SIGHUP to SIGKILL: an engine has nothing to save that it could in time
_QUIET_S = 1.0  # after the last command, before what nobody waits for is done
_SILENCE_S = 30.0  # of a client on another host, which pings: it is gone, or the network is
_PR_SET_CHILD_SUBREAPER = 36


class Starter:
    """The loop that serves commands and reaps the dead.

    All descriptors are plain numbers: in a child they are closed, and no object closes them again.
    """

    def __init__(
        self, folder: Path, client_pid: int, warm_s: float, needed: str, late: str
    ) -> None:
        self._folder = folder
        self._warm_s = warm_s
        self._is_remote = not client_pid
        self._environ = environ.inheritable(os.environ)  # of a host that is not the notebook's
        self._client_pid = client_pid
        # A mark for systemd-tmpfiles, which removes what is old and not locked.
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
        self._commands, self._line = _take_the_line()
        self._half = b""  # of a command that has not come to its end
        self._poll = select.poll()
        self._needed, self._late = deque(needed.split(",")), deque(late.split(","))
        self._asked: list[lines.Spawn] = []
        # pid -> what was asked for, and how long its log was: that is of who had the name before
        self._children: dict[int, tuple[lines.Spawn, int]] = {}
        self._pool: lines.Open | None = None
        self._locks = DeviceLocks(lock_folder())
        self._memory = OutOfMemoryWatch()
        self._serving = True
        self._listeners: list[socket.socket] = []
        self._heard_at = time.monotonic()
        self._leave_at = time.monotonic() + warm_s

    # ---- the loop ------------------------------------------------------------------------

    def serve(self) -> lines.Spawn | None:
        """Serve until the client is gone or nobody wants a pool. Gives None then, and in every
        forked child what it is to become."""
        client = -1
        if not self._is_remote:
            client = os.pidfd_open(self._client_pid)  # readable when it has ended
            self._poll.register(client, select.POLLIN)
        self._poll.register(self._commands, select.POLLIN)
        while self._serving:
            for asked in self._asked[:]:
                is_there = asked.target.partition(":")[0] in sys.modules
                if (is_there or not self._needed) and self._fork(asked):
                    return asked
            heard = self._poll.poll(0 if self._needed else 1000 * _QUIET_S)
            for descriptor, _ in heard:
                if descriptor == self._commands:
                    data = os.read(descriptor, 1 << 16)
                    self._serving &= data != b""
                    self._heard_at = time.monotonic()
                    *whole, self._half = (self._half + data).split(b"\n")
                    for line in whole:
                        self._do(lines.decode(line))
                elif descriptor == client:
                    self._serving = False
                else:  # a child has ended
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
            self._reap()
            if self._is_remote and time.monotonic() > self._heard_at + _SILENCE_S:
                print(f"it had not heard the notebook for {_SILENCE_S:.0f} s", file=sys.stderr)
                self._serving = False
            elif not heard:
                self._use_the_quiet()
        return None

    def introduce(self, reachable: str) -> None:
        """Say what this host is, and listen where others may reach it, in this network."""
        signal.signal(signal.SIGTERM, self._leave)  # of a scheduler whose job ends
        signal.signal(signal.SIGHUP, self._leave)
        os.write(self._line, b"\n")  # behind what a login shell may have said
        self._listeners, listens_at = network.listen(reachable)
        found, cores = asdict(discover()), num_usable_cores()
        self._tell(lines.Hello(versions(), found, cores, listens_at))

    def _leave(self, *_: object) -> None:
        self._serving = False

    def end(self) -> None:
        set_process_name(ENDING_STARTER)  # a new pool waits for our locks then
        self._kill_children()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _use_the_quiet(self) -> None:
        """Import the next thing, or look whether nobody wants a pool."""
        if self._needed:
            importlib.import_module(self._needed.popleft())
            if not self._needed:
                self._tell(lines.Ready())
        elif self._late:
            with contextlib.suppress(Exception):  # who needs it meets the error
                importlib.import_module(self._late.popleft())
        elif self._pool is None:
            self._serving = time.monotonic() < self._leave_at

    def _tell(self, event: lines.Line) -> None:
        data = lines.encode(event)
        while data:  # a signal may cut a long one in two
            data = data[os.write(self._line, data) :]

    # ---- what the client asks for --------------------------------------------------------

    def _do(self, command: lines.Line | None) -> None:
        match command:
            case lines.Open():
                self._pool = self._open(command)
            case lines.Ping():
                self._tell(command)
            case lines.Reach(targets):
                self._tell(lines.Reached(network.reach(targets)))
            case lines.Lock(devices, number, force):
                self._tell(lines.Locked(*self._locks.take(devices, number, force)))
            case lines.Spawn() if self._pool is not None:
                env = {**command.defaults, **self._pool.env, **command.env}
                self._asked.append(replace(command, env=env))
            case lines.Kill(names):
                self._asked = [asked for asked in self._asked if asked.name not in names]
                for pid, (asked, _) in self._children.items():
                    if asked.name in names:
                        _signal(pid, signal.SIGKILL)  # with all it forked
                self._tell(lines.Killed())
            case lines.Stop():
                self._stop()

    def _open(self, command: lines.Open) -> lines.Open:
        """The pool with its folder, and all that the environment of its processes has."""
        folder, env = command.folder, command.env
        if self._is_remote:
            for listener in self._listeners:
                listener.close()
            if command.before:
                shutil.rmtree(Path(command.before).parent, ignore_errors=True)
            folder = tempfile.mkdtemp(prefix="pool", dir=self._folder)
            os.mkdir(f"{folder}/profile")  # where the controller runs, that makes it
            env, why = self._environ, ""
            try:
                text = command.connection or Path(command.connection_path).read_text()
                Path(folder, lines.CONNECTION_FILE).write_text(text)
            except OSError as error:
                why = str(error)
            self._tell(lines.Opened(folder, why))
        places = {"GPUPOOL_FOLDER": str(self._folder), "GPUPOOL_POOL_FOLDER": folder}
        return replace(command, folder=folder, env={**env, **places}, connection="")

    def _stop(self) -> None:
        self._asked.clear()
        for pid in self._children:
            _signal(pid, signal.SIGHUP)  # SIGTERM ends an engine in the middle of anything
        deadline = time.monotonic() + STOP_GRACE_S
        while self._children and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        self._kill_children()
        self._locks.release()
        if self._pool is not None:
            shutil.rmtree(self._pool.folder, ignore_errors=True)
            self._pool = None
        self._leave_at = time.monotonic() + self._warm_s
        self._tell(lines.Stopped())

    # ---- the newborn ---------------------------------------------------------------------

    def _fork(self, asked: lines.Spawn) -> bool:
        """Fork a process; returns whether this is the child, which hears no signal yet."""
        self._asked.remove(asked)
        log = Path(asked.log)
        log_start = log.stat().st_size if log.exists() else 0
        gc.freeze()  # a collection in a child would write to, and so copy, the pages shared with it
        hears = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:  # no more processes: the others live on
            pid = -1
            self._tell(lines.Exited(asked.name, 1, str(error), ""))
        if pid == 0:
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, hears)
        if pid > 0:
            self._poll.register(os.pidfd_open(pid), select.POLLIN)
            self._children[pid] = asked, log_start
            self._memory.renew()
            self._tell(lines.Spawned(asked.name, pid))
        return False

    # ---- the dead ------------------------------------------------------------------------

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while (changed := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = changed[0], os.waitstatus_to_exitcode(changed[1])
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what it had forked
                if pid in self._children:  # else it is an orphan
                    asked, log_start = self._children.pop(pid)
                    tail = log_tail(Path(asked.log), log_start)
                    cause = cause_of_end(status, Path(asked.log), tail, self._memory)
                    self._tell(lines.Exited(asked.name, status, cause, tail))

    def _kill_children(self) -> None:
        """Kill and reap all children, and what they leave behind, for this process is its heir."""
        spared: set[int] = set()
        while victims := {child.pid for child in psutil.Process().children()} - spared:
            for pid in victims:
                try:
                    _signal(pid, signal.SIGKILL)
                    os.kill(pid, signal.SIGKILL)  # its group may be of others; a zombie takes it
                except PermissionError:  # it has become another user, as `sudo` does: not ours
                    spared.add(pid)
            for pid in victims - spared:
                os.waitpid(pid, 0)
                self._children.pop(pid, None)


def main() -> None:
    os.umask(0o077)
    set_process_name(STARTER)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # What the notebook's process has blocked its children would never hear either.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # No crash writes memory to the disk: it holds the variables that were sent, keys among them. A
    # limit of 0 would count for files only: with 1 the kernel starts no program that gathers cores
    # either. A cell may raise it again.
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    most = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (most, hard))
    os.chdir("/")  # the notebook's folder may be deleted any time
    gc.disable()  # a collection takes its time, and keeps nearly all of what is imported
    place, client_pid, warm_s, needed, late = sys.argv[1:]
    is_remote = client_pid == "0"
    folder = tempfile.mkdtemp(prefix="gpupool-pool-") if is_remote else place
    starter = Starter(Path(folder), int(client_pid), float(warm_s), needed, late)
    # OpenBLAS would start its threads when imported, and no thread survives a fork. torch makes a
    # folder for compiled code when it is imported; that of the ranks is chosen in `engine/boot.py`.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
    starter_pid, asked = os.getpid(), None
    try:
        with contextlib.suppress(BrokenPipeError, ProcessLookupError):  # the client has died
            if is_remote:
                starter.introduce(place)
            asked = starter.serve()
    finally:
        if asked is None:
            starter.end()
    if asked is not None:
        become(asked, starter_pid)


def become(asked: lines.Spawn, starter_pid: int) -> None:
    """Be the process that was asked for, with nothing that is the starter's alone."""
    set_process_name(f"gpupool:{asked.name.replace(' ', '')}")
    die_with(starter_pid)
    os.setsid()  # its own process group: killed with all it forked
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:  # the locks of GPUs are among them
            with contextlib.suppress(OSError):  # that of this very look
                os.close(descriptor)
    output = os.open(asked.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked.env)
    sys.argv = [f"gpupool {asked.name}", *asked.argv]
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    module, _, function = asked.target.partition(":")
    getattr(importlib.import_module(module), function)()


def _take_the_line() -> tuple[int, int]:
    """What comes on stdin, and stdout, of which what is imported reads and writes nothing then."""
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, events


def _signal(pid: int, number: int) -> None:
    """Send a signal to a child and what it has forked; a newborn may not lead its group yet."""
    with contextlib.suppress(PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


if __name__ == "__main__":
    main()
