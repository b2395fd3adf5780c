"""What the starter is asked to fork in tests."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time


def sleep() -> None:
    print("up", flush=True)
    time.sleep(60)


def tell_modules() -> None:
    print(*sys.modules)


def deaf() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    while True:
        time.sleep(1)


def hold_the_gil() -> None:
    print("up", flush=True)
    libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL while C sleeps
    libc.sleep(60)


def crash() -> None:
    faulthandler.enable()
    ctypes.string_at(0)


def fork_two() -> None:
    """One in its group, one in a session of its own."""
    first = subprocess.Popen(["sleep", "60"])
    second = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("children", first.pid, second.pid, flush=True)
    time.sleep(60)


def tell_surroundings() -> None:
    print("env", os.environ.get("OF_POOL"), os.environ.get("RANK"), len(os.environ), sys.argv[1:])
    print("session", os.getsid(0) == os.getpid(), "stdin", repr(sys.stdin.read()))
    print("fds", sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
    print("signals", signal.pthread_sigmask(signal.SIG_BLOCK, ()))
