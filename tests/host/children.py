"""What the agent's fork server is asked to become in tests."""

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
    """Hears that it is to end and does nothing about it."""
    signal.signal(signal.SIGHUP, lambda *_: print("told", flush=True))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    while True:
        time.sleep(1)


def hold_the_gil() -> None:
    print("up", flush=True)
    libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL while C sleeps
    libc.sleep(60)


def wait_for_interrupt() -> None:
    try:
        print("up", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def end_with_three() -> None:
    for i in range(100):
        print("line", i)
    sys.exit(3)


def raise_an_error() -> None:
    raise RuntimeError("what went wrong")


def crash() -> None:
    faulthandler.enable()

    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        else:
            ctypes.string_at(0)

    dive(40)


def fork_in_its_group() -> None:
    child = subprocess.Popen(["sleep", "60"])
    print("child", child.pid, flush=True)
    child.wait()


def fork_in_a_session_of_its_own() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(60)


def tell_surroundings() -> None:
    print("rank", os.environ.get("RANK"), "path", "PATH" in os.environ, sys.argv[1:])
    print("session", os.getsid(0) == os.getpid(), "stdin", repr(sys.stdin.read()))
    print("fds", sorted(map(int, os.listdir("/proc/self/fd")))[:-1])


def flood() -> None:
    os.write(1, b"x" * (17 << 20))
    print("the end", flush=True)
    time.sleep(60)


def eat_memory() -> None:
    print("up", flush=True)
    eaten = []
    while True:
        eaten.append(b"x" * (8 << 20))


def print_and_crash_or_sleep() -> None:
    """Crashes in its first life; in its second, with the same log, sleeps."""
    print("life", os.environ["LIFE"], flush=True)
    sleep() if os.environ["LIFE"] == "2" else crash()


def write_one_long_line() -> None:
    os.ftruncate(1, 4 << 30)  # a hole: of 4 GiB on no disk
    print("the end", flush=True)
    sys.exit(1)
