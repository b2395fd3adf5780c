"""The host agent: parent of the controller and of every engine of one machine.

Runs on the host as `python -m gpupool.host.agent FOLDER`, standard library only, one thread. FOLDER
is the pool's own: it holds keys, and is removed at the end, however that comes. The client writes
one JSON command a line to its stdin and reads one JSON event a line from its stdout:

    -> {"op": "spawn", "name": "rank 0", "argv": [...], "env": {...}, "log": "/run/.../rank0.log"}
    -> {"op": "signal", "name": "rank 0", "signal": 2}
    -> {"op": "stop"}
    <- {"event": "spawned", "name": "rank 0", "pid": 4711}
    <- {"event": "exited", "name": "rank 0", "status": -9, "log_tail": "..."}
    <- {"event": "stopped"}

stdin is the lifeline: when the client is gone, by whatever means, the pipe closes and everything
the agent started is killed. Should the agent itself be killed, the kernel ends its children
(PR_SET_PDEATHSIG). `env` holds additions to the agent's own environment and never a secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STOP_GRACE_S = 0.4  # from SIGTERM to SIGKILL: an engine has nothing to save that it could in time
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_LINES = 20
_CRASH = "Fatal Python error"  # faulthandler's first line; the innermost frames follow it


class Agent:
    """Children by name, and the loop that serves commands and reaps the dead."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        self._buffer = b""
        self._serving = True

    def serve(self) -> None:
        """Serve commands until told to stop or the client is gone; then nothing is left."""
        wake_reader = _wake_on_child_death()
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wake_reader, selectors.EVENT_READ)
        try:
            while self._serving:
                for key, _ in selector.select():
                    if key.fd == wake_reader:
                        os.read(wake_reader, 4096)
                        self._reap()
                    else:
                        self._read_commands()
        finally:
            self._kill_all()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read_commands(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:  # the client is gone
            self._serving = False
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            getattr(self, "_op_" + command.pop("op"))(**command)

    def _op_spawn(self, name: str, argv: list[str], env: dict[str, str], log: str) -> None:
        with open(log, "ab") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,  # its own process group: killed with all it forked
                preexec_fn=_die_with_parent,
            )
        self._children[name] = child, Path(log)
        _tell({"event": "spawned", "name": name, "pid": child.pid})

    def _op_signal(self, name: str, signal: int) -> None:
        child = self._children.get(name)
        if child and child[0].poll() is None:
            child[0].send_signal(signal)

    def _op_stop(self) -> None:
        for child, _ in self._children.values():
            _signal_group(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline and any(
            child.poll() is None for child, _ in self._children.values()
        ):
            time.sleep(0.01)
        self._kill_all()
        _tell({"event": "stopped"})
        self._serving = False

    def _reap(self) -> None:
        for name, (child, log) in list(self._children.items()):
            status = child.poll()
            if status is not None:
                _signal_group(child, signal.SIGKILL)  # what the dead process had forked
                del self._children[name]
                tail = _tail(log)
                _tell({"event": "exited", "name": name, "status": status, "log_tail": tail})

    def _kill_all(self) -> None:
        for child, _ in self._children.values():
            _signal_group(child, signal.SIGKILL)
        for child, _ in self._children.values():
            child.wait()
        self._children.clear()


def main() -> None:
    """Entry of `python -m gpupool.host.agent`."""
    os.umask(0o077)
    # Ctrl-C in a terminal is for the client to handle. Not SIG_IGN: children would inherit that.
    signal.signal(signal.SIGINT, lambda *_: None)
    with contextlib.suppress(BrokenPipeError):  # the client died while it was being told something
        Agent(Path(sys.argv[1])).serve()


def _tell(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _wake_on_child_death() -> int:
    """A file descriptor that becomes readable when a child has died."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # SIG_IGN would reap without telling
    return reader


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # PermissionError is macOS's answer for a group of zombies only
        os.killpg(child.pid, number)


def _tail(log: Path) -> str:
    """The end of a log; of a crash report the beginning, where the user's own lines are."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:  # the log is gone with its folder; the death still has to be told
        return ""
    crashes = [i for i, line in enumerate(lines) if line.startswith(_CRASH)]
    start = crashes[-1] if crashes else max(0, len(lines) - _LOG_TAIL_LINES)
    return "\n".join(lines[start : start + _LOG_TAIL_LINES])


if __name__ == "__main__":
    main()
