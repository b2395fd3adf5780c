"""Run the suite; run what failed once more, alone: python -m tests.run [arguments of pytest].

A test that passes then is unstable, and is printed as such. It is to be mended or deleted: more
than two of them fail the run, as does a test that fails twice.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

MOST_UNSTABLE = 2
MOST_AGAIN = 20  # of more than these something else is wrong
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: list[str]) -> int:
    # What runs in the background may have been told to ignore it, and tests press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    FAILED.unlink(missing_ok=True)
    status = _pytest(*arguments)
    failed = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if status != 1 or not 0 < len(failed) <= MOST_AGAIN:  # 1: tests have failed, and all were run
        return status
    print(f"\n{len(failed)} failed: once more, alone", flush=True)
    alone = [one for one in arguments if one in ("--long", "--hosts")] + ["--numprocesses=0"]
    twice = [test for test in failed if _pytest(*alone, test) != 0]
    unstable = [test for test in failed if test not in twice]
    for kind, tests in (("UNSTABLE", unstable), ("FAILED TWICE", twice)):
        for test in tests:
            print(f"{kind} {test}")
    return int(bool(twice) or len(unstable) > MOST_UNSTABLE)


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
