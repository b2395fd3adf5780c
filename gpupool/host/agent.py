"""The host agent: parent of the controller and of every engine of one machine.

Runs on the host as `python -m gpupool.host.agent FOLDER CLIENT_PID WARM_S MODULE ...`: one thread,
the standard library only. Its first child, the fork server (`forkserver.py`), imports the modules
and forks all others. The client writes commands to its stdin and reads events from its stdout, one
a line: `gpupool/core/wire/agent.py` lists them.

It serves one pool at a time, from `Open` to `Stop`, and ends automatically when none has been open
for WARM_S seconds. stdin is the lifeline: when it closes or the client dies, by whatever means, all
that the agent started is killed and FOLDER, which holds keys, removed. Should the agent itself be
killed, the kernel ends its children (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from gpupool.core.machine.locks import AGENT, ENDING_AGENT, DeviceLocks, hold_folder, lock_folder
from gpupool.core.machine.processes import children, set_process_name
from gpupool.core.wire import agent as lines
from gpupool.core.wire.json_lines import JsonLines, encode
from gpupool.host.endings import cause_of_end, log_tail, shorten
from gpupool.host.memory import OutOfMemoryWatch
from gpupool.host.spawner import Spawner

STOP_GRACE_S = 0.4  # from SIGHUP to SIGKILL: an engine has nothing to save that it could in time
_TEND_S = 4.0  # while a pool is open: how often its files are looked at
_YOUNG_S = 600.0  # cleaners of temporary files remove what is older, by hours at least
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Child:
    """A process whose end the agent has to report."""

    name: str
    log: Path
    log_start: int = 0  # bytes; what is before is of a process that had the name earlier


class Agent:
    """The processes of a pool by pid, and the loop that serves commands and reaps the dead."""

    def __init__(self, folder: Path, client_pid: int, warm_s: float, modules: list[str]) -> None:
        self._folder = folder
        self._warm_s = warm_s
        self._client = os.pidfd_open(client_pid)  # readable when it has ended
        hold_folder(folder)  # for as long as this process lives
        self._pool_folder: Path | None = None
        self._children: dict[int, Child] = {}
        self._log_starts: dict[str, int] = {}
        self._unclaimed: dict[int, int] = {}  # pid -> status, ended before their name was known
        self._forked: dict[int, lines.Forked] = {}  # pid -> who is not up yet
        self._locks = DeviceLocks(lock_folder())
        self._memory = OutOfMemoryWatch()
        self._spawner = Spawner(folder, modules)
        self._selector = selectors.DefaultSelector()
        self._serving = True
        self._tend_at = self._renew_at = 0.0

    # ---- the loop ------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve commands until the client is gone or nobody wants a pool; then nothing is left."""
        wake = _wake_on_child_death()
        commands = JsonLines(sys.stdin.buffer, lines.COMMANDS)
        self._watch(commands.descriptor, lambda: self._read_commands(commands))
        self._watch(self._client, self._leave)
        self._watch(wake, lambda: self._reap(wake))
        try:
            self._start_server()
            while self._serving:
                until_then = max(0.0, self._tend_at - time.monotonic())
                ready = self._selector.select(until_then if self._pool_folder else self._warm_s)
                if not ready and self._pool_folder is None:
                    self._leave()
                for key, _ in ready:
                    key.data()
                self._tend(time.monotonic())
        finally:
            set_process_name(ENDING_AGENT)  # a new pool waits for our locks then
            self._kill_children(spare_server=False)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tend(self, now: float) -> None:
        """Now and then: no log may fill the disk, no file of a pool in use become old."""
        if now < self._tend_at:
            return
        self._tend_at = now + _TEND_S
        for log in (*self._folder.glob("*.log"), *self._folder.glob("*/*.log")):
            with contextlib.suppress(OSError):  # the disk is full, or it is gone
                shorten(log)
        if now >= self._renew_at:
            self._renew_at = now + _YOUNG_S
            for path in (self._folder, *self._folder.rglob("*")):
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)

    def _watch(self, descriptor: int, react: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def _leave(self) -> None:
        self._serving = False

    def _read_commands(self, commands: JsonLines[lines.Command]) -> None:
        for command in commands.read():
            self._do(command)
        if commands.closed:
            self._leave()

    # ---- what the client asks for --------------------------------------------------------

    def _do(self, command: lines.Command) -> None:
        match command:
            case lines.Open(folder):
                self._open(Path(folder))
            case lines.Lock():
                self._lock(command)
            case lines.Spawn():
                self._spawn(command)
            case lines.Signal(name, number):
                for pid in self._pids_of({name}):
                    os.kill(pid, number)
            case lines.Kill(names):
                self._kill(names)
            case lines.Stop():
                self._stop()

    def _open(self, folder: Path) -> None:
        self._pool_folder = folder
        self._need_server()
        if self._spawner.ready:
            _tell(lines.Ready())

    def _lock(self, asked: lines.Lock) -> None:
        try:
            taken, others = self._locks.take(asked.devices, asked.number, asked.force)
        except OSError as error:  # of the lock files: reported, it must not end the agent
            self._locks.release()
            _tell(lines.Locked([], {}, str(error)))
        else:
            _tell(lines.Locked(taken, others))

    def _spawn(self, request: lines.Spawn) -> None:
        if not self._need_server():
            return
        log = Path(request.log)
        self._log_starts[request.name] = log.stat().st_size if log.exists() else 0
        self._spawner.ask(request)

    def _kill(self, names: Collection[str]) -> None:
        self._spawner.forget(names)
        for pid in self._pids_of(names):
            _signal_group(pid, signal.SIGKILL)  # with all it forked
        _tell(lines.Killed())

    def _stop(self) -> None:
        self._spawner.forget_all()
        self._log_starts.clear()
        for pid in self._pool_pids():
            _signal_group(pid, signal.SIGHUP)  # SIGTERM ends an engine in the middle of anything
        deadline = time.monotonic() + STOP_GRACE_S
        while self._pool_pids() and time.monotonic() < deadline:
            time.sleep(0.01)
            self._collect()
        self._kill_children(spare_server=True)
        self._locks.release()
        if self._pool_folder is not None:
            shutil.rmtree(self._pool_folder, ignore_errors=True)
            self._pool_folder = None
        _tell(lines.Stopped())

    # ---- the fork server -----------------------------------------------------------------

    def _need_server(self) -> bool:
        """Start the fork server if there is none; returns whether there is one."""
        try:
            if self._spawner.pid is None:
                self._start_server()
        except OSError as error:  # no more processes or files: reported, the others live on
            _tell(lines.Exited(lines.FORK_SERVER, 1, str(error), log_tail=""))
            return False
        return True

    def _start_server(self) -> None:
        said = self._spawner.start()
        assert self._spawner.pid is not None
        self._children[self._spawner.pid] = Child(lines.FORK_SERVER, self._spawner.log)
        self._watch(said.descriptor, lambda: self._hear_server(said))

    def _hear_server(self, said: JsonLines[lines.Answer]) -> None:
        for line in said.read():
            if isinstance(line, lines.Ready):
                self._spawner.hear(line)
                if self._spawner.ready:  # else it has ended since
                    _tell(line)
            elif line.is_up or line.pid in self._unclaimed:  # the latter never came up
                self._forked.pop(line.pid, None)
                self._claim(line)
            elif line.pid not in self._children:  # else its own line has come before this one
                self._forked[line.pid] = line
        if said.closed:
            self._selector.unregister(said.descriptor)
            said.close()

    def _claim(self, line: lines.Forked) -> None:
        if self._spawner.hear(line):
            self._adopt(line.name, line.pid, Path(line.log))
        elif self._unclaimed.pop(line.pid, None) is None:
            _signal_group(line.pid, signal.SIGKILL)

    def _adopt(self, name: str, pid: int, log: Path) -> None:
        _tell(lines.Spawned(name, pid))
        self._memory.renew()
        start = self._log_starts.pop(name, 0)
        if pid in self._unclaimed:
            self._tell_end(name, log, start, self._unclaimed.pop(pid))
        else:
            self._children[pid] = Child(name, log, start)

    # ---- the dead ------------------------------------------------------------------------

    def _reap(self, wake: int) -> None:
        os.read(wake, 4096)
        for pid, status, child in self._collect():
            _signal_group(pid, signal.SIGKILL)  # what the dead process had forked
            if child is not None:
                self._tell_end(child.name, child.log, child.log_start, status)
            elif self._spawner.expects:
                self._unclaimed[pid] = status
                if pid in self._forked:
                    self._claim(self._forked.pop(pid))

    def _collect(self) -> list[tuple[int, int, Child | None]]:
        """(pid, exit status, who it was) of each child that has ended since; None: an orphan."""
        found = []
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while (changed := os.waitpid(-1, os.WNOHANG))[0]:
                pid = changed[0]
                status = os.waitstatus_to_exitcode(changed[1])
                if pid == self._spawner.pid:
                    self._spawner.lost(status)
                found.append((pid, status, self._children.pop(pid, None)))
        return found

    def _tell_end(self, name: str, log: Path, log_start: int, status: int) -> None:
        tail = log_tail(log, log_start)
        cause = cause_of_end(status, log.parent, tail, self._memory)
        _tell(lines.Exited(name, status, cause, tail))

    # ---- the end -------------------------------------------------------------------------

    def _pids_of(self, names: Collection[str]) -> list[int]:
        return [pid for pid, child in self._children.items() if child.name in names]

    def _pool_pids(self) -> list[int]:
        return [pid for pid in self._children if pid != self._spawner.pid]

    def _kill_children(self, spare_server: bool) -> None:
        """Kill and reap all children, and what they leave behind, for the agent is its heir."""
        spared = {self._spawner.pid} if spare_server else set()
        while victims := set(children(os.getpid())) - spared:
            for pid in victims:
                _signal_group(pid, signal.SIGKILL)
                try:
                    os.kill(pid, signal.SIGKILL)  # one that leads no group; a zombie takes it
                except PermissionError:  # it has become another user, as `sudo` does: not ours
                    spared.add(pid)
            for pid in victims - spared:
                os.waitpid(pid, 0)
                self._children.pop(pid, None)
        self._unclaimed.clear()
        self._forked.clear()


def main() -> None:
    """Entry of `python -m gpupool.host.agent`."""
    os.umask(0o077)
    if sys.platform != "linux":
        raise SystemExit("gpupool runs on Linux: it needs PR_SET_PDEATHSIG and pidfd_open.")
    set_process_name(AGENT)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # What the notebook's process has blocked its children would never hear either.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Ctrl-C in a terminal is for the client to handle. Not SIG_IGN: children would inherit that.
    signal.signal(signal.SIGINT, lambda *_: None)
    with contextlib.suppress(BrokenPipeError):  # the client died while something was sent to it
        folder, client_pid, warm_s, *modules = sys.argv[1:]
        try:
            agent = Agent(Path(folder), int(client_pid), float(warm_s), modules)
        except ProcessLookupError:  # the client has died already
            shutil.rmtree(folder, ignore_errors=True)
        else:
            agent.serve()


def _tell(event: lines.Event) -> None:
    sys.stdout.buffer.write(encode(event))
    sys.stdout.buffer.flush()


def _wake_on_child_death() -> int:
    """A file descriptor that becomes readable when a child has died."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # SIG_IGN would reap without a notice
    return reader


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


if __name__ == "__main__":
    main()
