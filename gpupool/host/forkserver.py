"""The fork server: imports what every engine needs once, then forks. Runs on the host.

`python -m gpupool.host.forkserver AGENT_PID STEP ...` is a child of the agent. A step is a module
to import, or `=TARGET`: that target can be forked from here on. After the last of these, or after
all modules, it says that it is ready for any other target. The modules that are left are imported
while nobody asks for anything. Each line of stdin is a `Spawn`; it answers with `Ready` once, and
twice with `Forked` for each process (`gpupool/core/wire/agent.py`).

What it forks becomes a child of the agent, which reports its end, and has the environment and the
log of its own request. Nothing here may start a thread, open a zmq context or touch CUDA: none of
them survives a fork. torch is only ever imported here because the agent names it.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import select
import sys
import time

from gpupool.core.machine.processes import die_with, process_name, set_process_name
from gpupool.core.wire.agent import Answer, Forked, Ready, Spawn
from gpupool.core.wire.json_lines import JsonLines, encode

_NEW_PARENT_TIMEOUT_S = 5.0
_FORKED_AT_ONCE = 4  # by one go-between: a fork of a process with torch takes 10 ms
_QUIET_S = 1.0  # after the last request, before what is left is imported


def main() -> None:
    """Serve until the agent closes stdin. Continues in every forked child as what was asked for."""
    agent_pid = int(sys.argv[1])
    set_process_name("gpupool:forks")
    die_with(agent_pid)
    leave_no_core()
    os.chdir("/")  # the notebook's folder may be deleted any time
    gc.disable()  # a collection takes its time, and keeps nearly all of what is imported
    request = _serve(JsonLines(sys.stdin.buffer, [Spawn]), sys.argv[2:])
    gc.enable()
    if request is not None:
        _become(agent_pid, request)


def leave_no_core() -> None:
    """Have a crash of this process, or of one it forks, write no memory to the disk.

    It would hold the variables that were sent, keys among them, and take gigabytes. A limit of 0
    would count for files only: with 1 the kernel starts no program that gathers cores either. A
    cell may raise it again: `resource.setrlimit(resource.RLIMIT_CORE, ...)`.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    most = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (most, hard))


def _serve(asked: JsonLines[Spawn], steps: list[str]) -> Spawn | None:
    """A request, in the child forked for it; None in the server itself, at the end."""
    targets = [number for number, step in enumerate(steps, 1) if step.startswith("=")]
    num_needed = targets[-1] if targets else len(steps)
    num_done, is_ready = 0, False
    able: set[str] = set()
    waiting: list[Spawn] = []
    while not asked.closed:
        if not is_ready and num_done >= num_needed:
            is_ready = True
            _tell(Ready())
        now = [one for one in waiting if is_ready or one.target in able][:_FORKED_AT_ONCE]
        if now:
            mine = _fork(now)
            if mine is not None:
                return mine
            waiting = [one for one in waiting if one not in now]
            continue
        is_done = num_done == len(steps)
        wait_s = None if is_done else _QUIET_S if is_ready else 0
        if select.select([asked.descriptor], [], [], wait_s)[0]:
            waiting += asked.read()
        elif not is_done:
            step = steps[num_done]
            able.add(step[1:]) if step.startswith("=") else importlib.import_module(step)
            num_done += 1
    return None


def _fork(requests: list[Spawn]) -> Spawn | None:
    """Fork one process for each of these; a request in the child forked for it, None here."""
    gc.freeze()  # a collection in a child would write to, and so copy, the pages shared with it
    # The go-between ends at once, and the kernel hands its children to the agent, which is the
    # subreaper: the only way to fork for another parent.
    if os.fork() == 0:
        for request in requests:
            pid = os.fork()
            if pid == 0:
                return request
            _tell_fork(request, pid, is_up=False)  # it may die before it says so
        os._exit(0)
    if os.wait()[1] != 0:  # it has left the reason in the log
        raise OSError("the go-between could not fork")
    return None


def _become(agent_pid: int, request: Spawn) -> None:
    deadline = time.monotonic() + _NEW_PARENT_TIMEOUT_S
    while os.getppid() != agent_pid and time.monotonic() < deadline:
        time.sleep(0.001)
    die_with(agent_pid)
    os.setsid()  # its own process group: killed with all it forked
    _tell_fork(request, os.getpid(), is_up=True)
    output = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, descriptor)
    os.close(output)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request.env)
    set_process_name(process_name(request.name))
    sys.argv = [f"gpupool {request.name}", *request.argv]
    module, _, function = request.target.partition(":")
    getattr(importlib.import_module(module), function)()


def _tell_fork(request: Spawn, pid: int, *, is_up: bool) -> None:
    _tell(Forked(request.number, request.name, request.log, pid, is_up))


def _tell(answer: Answer) -> None:
    """One line in one write: lines of several children do not mix in a pipe (PIPE_BUF)."""
    os.write(1, encode(answer))


if __name__ == "__main__":
    main()
