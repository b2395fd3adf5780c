"""The starter: parent of the controller and of every engine of one machine. Runs on the host.

Started as `starter FOLDER CLIENT_PID WARM_S STEP ...`, it imports once what every engine needs, and
then forks them. A step is a module to import, or `=TARGET`: that target can be forked from here on.
After the last of these, or after all modules, it says that it is ready for any other target; what
is left is imported while nobody asks for anything. The client writes commands to its stdin and
reads events from its stdout, one a line (`gpupool/core/wire/starter.py`), whatever stands between.

It serves one pool at a time, from `Open` to `Stop`, and ends when none has been open for WARM_S
seconds. stdin is the lifeline: when it closes or the client dies, by whatever means, all that was
started is killed and FOLDER, which holds keys, removed. Should the starter itself be killed, the
kernel ends its children (PR_SET_PDEATHSIG).

One thread, and nothing here may open a zmq context or touch CUDA: none of that survives a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from gpupool.core.machine.locks import (
    ENDING_STARTER,
    STARTER,
    DeviceLocks,
    hold_folder,
    lock_folder,
)
from gpupool.core.machine.processes import (
    children,
    die_with,
    lack_of_processes,
    process_name,
    set_process_name,
)
from gpupool.core.wire import starter as lines
from gpupool.core.wire.json_lines import JsonLines, encode
from gpupool.host.endings import OutOfMemoryWatch, cause_of_end, log_tail, shorten

STOP_GRACE_S = 0.4  # from SIGHUP to SIGKILL: an engine has nothing to save that it could in time
_QUIET_S = 1.0  # after the last command, before what nobody waits for is imported
_TEND_S = 4.0  # while a pool is open: how often its files are looked at
_YOUNG_S = 600.0  # cleaners of temporary files remove what is older, by hours at least
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Child:
    """A process whose end has to be reported."""

    name: str
    log: Path
    log_start: int  # bytes; what is before is of a process that had the name earlier


class Starter:
    """The processes of a pool by pid, and the loop that serves commands and reaps the dead.

    All descriptors are plain numbers: in a child they are closed, and no object closes them again.
    """

    def __init__(self, folder: Path, client_pid: int, warm_s: float, steps: list[str]) -> None:
        self._folder = folder
        self._warm_s = warm_s
        self._client = os.pidfd_open(client_pid)  # readable when it has ended
        hold_folder(folder)  # for as long as this process lives
        self._commands, self._line = _take_the_line()
        self._wake = _wake_on_child_death()
        self._poll = select.poll()
        for descriptor in (self._commands.descriptor, self._client, self._wake):
            self._poll.register(descriptor, select.POLLIN)
        targets = [number for number, step in enumerate(steps, 1) if step.startswith("=")]
        num_needed = targets[-1] if targets else len(steps)
        self._needed, self._late = deque(steps[:num_needed]), deque(steps[num_needed:])
        self._able: set[str] = set()  # targets that can be forked already
        self._asked: list[lines.Spawn] = []
        self._children: dict[int, Child] = {}
        self._pool: lines.Open | None = None
        self._locks = DeviceLocks(lock_folder())
        self._memory = OutOfMemoryWatch()
        self._serving = True
        self._leave_at = time.monotonic() + warm_s
        self._tend_at = self._renew_at = 0.0

    # ---- the loop ------------------------------------------------------------------------

    def serve(self) -> lines.Spawn | None:
        """Serve commands until the client is gone or nobody wants a pool.

        Returns:
            None at the end; in every forked child what it is to become.
        """
        if not self._needed:
            self._tell(lines.Ready())
        while self._serving:
            asked = self._next_to_fork()
            if asked is not None and self._fork(asked):
                return asked
            heard = self._poll.poll(1000 * self._wait_s())
            for descriptor, _ in heard:
                if descriptor == self._wake:
                    self._reap()
                elif descriptor == self._commands.descriptor:
                    self._read_commands()
                else:  # the client
                    self._serving = False
            if not heard and self._next_to_fork() is None:
                self._use_the_quiet()
            self._tend(time.monotonic())
        return None

    def end(self) -> None:
        """Leave nothing behind."""
        set_process_name(ENDING_STARTER)  # a new pool waits for our locks then
        self._kill_children()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_s(self) -> float:
        if self._needed or self._next_to_fork() is not None:
            return 0.0
        if self._late:
            return _QUIET_S
        return max(0.0, (self._tend_at if self._pool else self._leave_at) - time.monotonic())

    def _use_the_quiet(self) -> None:
        """Import the next thing, or leave if nobody has wanted a pool for long."""
        if self._needed:
            step = self._needed.popleft()
            self._able.add(step[1:]) if step.startswith("=") else importlib.import_module(step)
            if not self._needed:
                self._tell(lines.Ready())
        elif self._late:
            with contextlib.suppress(Exception):  # who needs it meets the error
                importlib.import_module(self._late.popleft())
        elif self._pool is None and time.monotonic() >= self._leave_at:
            self._serving = False

    def _tend(self, now: float) -> None:
        """Now and then: no log may fill the disk, no file of a pool in use become old."""
        if self._pool is None or now < self._tend_at:
            return
        self._tend_at = now + _TEND_S
        for log in self._folder.glob("*/*.log"):
            with contextlib.suppress(OSError):  # the disk is full, or it is gone
                shorten(log)
        if now >= self._renew_at:
            self._renew_at = now + _YOUNG_S
            for path in (self._folder, *self._folder.rglob("*")):
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)

    def _read_commands(self) -> None:
        for command in self._commands.read():
            self._do(command)
        if self._commands.closed:
            self._serving = False

    def _tell(self, event: lines.Event) -> None:
        data = encode(event)
        while data:  # a signal may cut a long one in two
            data = data[os.write(self._line, data) :]

    # ---- what the client asks for --------------------------------------------------------

    def _do(self, command: lines.Command) -> None:
        match command:
            case lines.Open():
                self._pool = command
            case lines.Lock():
                self._lock(command)
            case lines.Spawn() if self._pool is not None:
                self._asked.append(replace(command, env={**self._pool.env, **command.env}))
            case lines.Signal(name, number):
                for pid in self._pids_of({name}):
                    os.kill(pid, number)
            case lines.Kill(names):
                self._kill(names)
            case lines.Stop():
                self._stop()

    def _lock(self, asked: lines.Lock) -> None:
        try:
            taken, others = self._locks.take(asked.devices, asked.number, asked.force)
        except OSError as error:  # of the lock files: reported, it must not end the starter
            self._locks.release()
            self._tell(lines.Locked([], {}, str(error)))
        else:
            self._tell(lines.Locked(taken, others))

    def _kill(self, names: Collection[str]) -> None:
        self._asked = [one for one in self._asked if one.name not in names]
        for pid in self._pids_of(names):
            _signal(pid, signal.SIGKILL)  # with all it forked
        self._tell(lines.Killed())

    def _stop(self) -> None:
        self._asked.clear()
        for pid in self._children:
            _signal(pid, signal.SIGHUP)  # SIGTERM ends an engine in the middle of anything
        deadline = time.monotonic() + STOP_GRACE_S
        while self._children and time.monotonic() < deadline:
            time.sleep(0.01)
            self._collect()
        self._kill_children()
        self._locks.release()
        if self._pool is not None:
            shutil.rmtree(self._pool.folder, ignore_errors=True)
            self._pool = None
        self._leave_at = time.monotonic() + self._warm_s
        self._tell(lines.Stopped())

    # ---- the newborn ---------------------------------------------------------------------

    def _next_to_fork(self) -> lines.Spawn | None:
        """Which process that was asked for can be forked now."""
        able = (one for one in self._asked if not self._needed or one.target in self._able)
        return next(able, None)

    def _fork(self, asked: lines.Spawn) -> bool:
        """Fork a process; returns whether this is the child, which hears no signal yet."""
        self._asked.remove(asked)
        log = Path(asked.log)
        child = Child(asked.name, log, log.stat().st_size if log.exists() else 0)
        gc.freeze()  # a collection in a child would write to, and so copy, the pages shared with it
        hears = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        why = ""
        try:
            pid = os.fork()
        except OSError as error:  # no more processes: the others live on
            why = lack_of_processes(str(error)) or str(error)
        else:
            if pid == 0:
                return True
        signal.pthread_sigmask(signal.SIG_SETMASK, hears)
        if why:
            self._tell(lines.Exited(asked.name, 1, why, ""))
        else:
            self._children[pid] = child
            self._memory.renew()
            self._tell(lines.Spawned(asked.name, pid))
        return False

    # ---- the dead ------------------------------------------------------------------------

    def _reap(self) -> None:
        os.read(self._wake, 4096)
        for pid, status, child in self._collect():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what the dead process had forked
            if child is not None:
                tail = log_tail(child.log, child.log_start)
                cause = cause_of_end(status, child.log.parent, tail, self._memory)
                self._tell(lines.Exited(child.name, status, cause, tail))

    def _collect(self) -> list[tuple[int, int, Child | None]]:
        """(pid, exit status, who it was) of each child that has ended since; None: an orphan."""
        found = []
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while (changed := os.waitpid(-1, os.WNOHANG))[0]:
                status = os.waitstatus_to_exitcode(changed[1])
                found.append((changed[0], status, self._children.pop(changed[0], None)))
        return found

    def _pids_of(self, names: Collection[str]) -> list[int]:
        return [pid for pid, child in self._children.items() if child.name in names]

    def _kill_children(self) -> None:
        """Kill and reap all children, and what they leave behind, for this process is its heir."""
        spared: set[int] = set()
        while victims := set(children(os.getpid())) - spared:
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
    """Serve until nobody needs it. Continues in every forked child as what was asked for."""
    if sys.platform != "linux":
        raise SystemExit("gpupool runs on Linux: it needs PR_SET_PDEATHSIG and pidfd_open.")
    os.umask(0o077)
    set_process_name(STARTER)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # What the notebook's process has blocked its children would never hear either.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Ctrl-C in a terminal is for the client to handle.
    signal.signal(signal.SIGINT, lambda *_: None)
    leave_no_core()
    os.chdir("/")  # the notebook's folder may be deleted any time
    gc.disable()  # a collection takes its time, and keeps nearly all of what is imported
    folder, client_pid, warm_s, *steps = sys.argv[1:]
    # OpenBLAS would start its threads when imported, and no thread survives a fork. torch makes a
    # folder for compiled code when it is imported; that of the ranks is chosen in `engine/boot.py`.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
    try:
        starter = Starter(Path(folder), int(client_pid), float(warm_s), steps)
    except ProcessLookupError:  # the client has died already
        shutil.rmtree(folder, ignore_errors=True)
        return
    starter_pid, asked = os.getpid(), None
    try:
        with contextlib.suppress(BrokenPipeError):  # the client died while it was told something
            asked = starter.serve()
    finally:
        if asked is None:
            starter.end()
    if asked is not None:
        become(asked, starter_pid)


def become(asked: lines.Spawn, starter_pid: int) -> None:
    """Be the process that was asked for, with nothing that is the starter's alone."""
    set_process_name(process_name(asked.name))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    module, _, function = asked.target.partition(":")
    getattr(importlib.import_module(module), function)()


def leave_no_core() -> None:
    """Have a crash of this process, or of one it forks, write no memory to the disk.

    It would hold the variables that were sent, keys among them, and take gigabytes. A limit of 0
    would count for files only: with 1 the kernel starts no program that gathers cores either. A
    cell may raise it again: `resource.setrlimit(resource.RLIMIT_CORE, ...)`.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    most = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (most, hard))


def _take_the_line() -> tuple[JsonLines[lines.Command], int]:
    """What comes on stdin, and stdout, of which what is imported reads and writes nothing then."""
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return JsonLines(commands, lines.COMMANDS), events


def _wake_on_child_death() -> int:
    """A descriptor that becomes readable when a child has died."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # SIG_IGN would reap without a notice
    return reader


def _signal(pid: int, number: int) -> None:
    """Send a signal to a child and what it has forked; a newborn may not lead its group yet."""
    with contextlib.suppress(PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


if __name__ == "__main__":
    main()
