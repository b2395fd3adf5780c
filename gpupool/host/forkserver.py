"""The fork server: imports what every engine needs once, then forks. Runs on the host.

`python -m gpupool.host.forkserver AGENT_PID MODULE ...` is a child of the agent. It imports the
modules, says that it is ready, and reads one request a line from stdin:

    -> {"number": 3, "name": "rank 0", "target": "gpupool.engine.boot:main",
        "argv": ["--file=..."], "env": {...}, "log": "/run/.../rank0.log"}
    <- {"ready": true}
    <- {"number": 3, "name": "rank 0", "log": "/run/.../rank0.log", "pid": 4711}

What it forks becomes a child of the agent, which tells of its end, and has the environment and the
log of its own request. Nothing here may start a thread, open a zmq context or touch CUDA: none of
them survives a fork. torch is only ever imported here because the agent names it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any

from gpupool.core.processes import set_process_name

_PR_SET_PDEATHSIG = 1
_NEW_PARENT_TIMEOUT_S = 5.0


def main() -> None:
    """Serve until the agent closes stdin. Goes on in every forked child as what was asked for."""
    agent_pid = int(sys.argv[1])
    set_process_name("gpupool:forks")
    die_with(agent_pid)
    leave_no_core()
    os.chdir(os.environ["GPUPOOL_FOLDER"])  # the notebook's may be deleted any time
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, the pages shared with it
    _tell({"ready": True})
    request = _serve()
    if request is not None:
        _become(agent_pid, **request)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, also if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_no_core() -> None:
    """Have a crash of this process, or of one it forks, write no memory to the disk.

    It would hold the variables that were sent, keys among them, and take gigabytes. A limit of 0
    would count for files only: with 1 the kernel starts no program that gathers cores either. A
    cell may raise it again: `resource.setrlimit(resource.RLIMIT_CORE, ...)`.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    most = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (most, hard))


def _serve() -> dict[str, Any] | None:
    """A request, in the child forked for it; None in the server itself, at the end."""
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            # The go-between ends at once, and the kernel hands its child to the agent, which is
            # the subreaper: the only way to fork for another parent.
            if os.fork() == 0:
                return dict(json.loads(line))
            os._exit(0)
        if os.wait()[1] != 0:  # it has left the reason in the log
            raise OSError("the go-between could not fork")
    return None


def _become(
    agent_pid: int,
    number: int,
    name: str,
    target: str,
    argv: list[str],
    env: dict[str, str],
    log: str,
) -> None:
    deadline = time.monotonic() + _NEW_PARENT_TIMEOUT_S
    while os.getppid() != agent_pid and time.monotonic() < deadline:
        time.sleep(0.001)
    die_with(agent_pid)
    os.setsid()  # its own process group: killed with all it forked
    _tell({"number": number, "name": name, "log": log, "pid": os.getpid()})
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, descriptor)
    os.close(output)
    os.close(nothing)
    sys.stdin = open(0)  # noqa: SIM115 - the old one holds the requests of others, read ahead
    os.environ.clear()
    os.environ.update(env)
    set_process_name(f"gpupool:{name.replace(' ', '')}")
    sys.argv = [f"gpupool {name}", *argv]
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)()


def _tell(event: dict[str, Any]) -> None:
    """One line in one write: lines of several children do not mix in a pipe (PIPE_BUF)."""
    os.write(1, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    main()
