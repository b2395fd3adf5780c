"""`%gpupool check`: the command of the shell, as a process of its own. Runs on the client.

The notebook's own process is left alone: it may hold tensors, and its kernel must hear the stop
button. The checks end their processes themselves, however they are asked to.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence

from gpupool.core.errors import PoolError
from gpupool.core.machine.processes import command_for
from gpupool.pool import session
from gpupool.pool.calls.presses import ignored

_END_S = 120.0  # within which an interrupted check has stopped its pool


def run(arguments: Sequence[str]) -> None:
    """Run `python -m gpupool check` and print its lines as they come.

    Raises:
        PoolError: a pool runs in this notebook.
        KeyboardInterrupt: by the user; the check has ended.
    """
    if session.find() is not None:
        raise PoolError(
            "a pool runs in this notebook, and a check breaks the ranks it works with. Stop the "
            "pool first: `%gpupool stop`.",
            "running",
        )
    with subprocess.Popen(
        [*command_for("gpupool.__main__"), "check", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the button's interrupt is passed on, once
    ) as process:
        try:
            _print_lines(process)
        except KeyboardInterrupt:
            late = threading.Timer(_END_S, process.kill)  # its agent ends the ranks then
            with ignored():
                process.send_signal(signal.SIGINT)
                late.start()
                _print_lines(process)
                process.wait()
                late.cancel()
            raise


def _print_lines(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
