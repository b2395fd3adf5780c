"""The hosts of a pool: got from a scheduler, held, and given back. Runs on the client."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from gpupool.core.errors import PoolError, PoolStartError
from gpupool.core.machine.processes import dying_with_us
from gpupool.core.options.clusters import Cluster, hosts_of
from gpupool.core.terminal import CODES, plain
from gpupool.core.urls import without_passwords
from gpupool.core.wire import environ
from gpupool.pool.notices import Progress, unheard

_LOOK_S, _WATCH_S, _ASK_S = 0.05, 0.2, 2.0  # how often: for an answer, for an end, at the queue
_ANSWER_S = 20.0  # of what is asked, where a server may be slow
_END_S = 5.0  # to give the hosts back, before that is enforced
_NOTICE_S, _LIMIT_S = 150.0, 30.0  # before the time limit; how often that is asked for
_TAIL_BYTES = 1 << 14
_JOB = re.compile(r"\bjob (?:allocation )?(\d[\w.]*)")
_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


class Allocation:
    """The hosts of a cluster, with the ranks of each where it says them.

    Made, it has them, or has raised: it waits without a limit, and says how things stand.
    KeyboardInterrupt, or `is_stopped`, cancels. `on_end` hears in words that they are gone, unless
    they were given back, `on_notice` that they soon will be; both in a background thread. A
    PoolError says that it was stopped, or why there are none (PoolStartError).
    """

    def __init__(
        self,
        cluster: Cluster,
        say: Progress = unheard,
        is_stopped: Callable[[], bool] = lambda: False,
        on_end: Progress = unheard,
        on_notice: Progress = unheard,
    ) -> None:
        self.job = ""
        self.hosts: list[tuple[str, int | None]] = []
        # Schedulers keep the environment, and send it about; what drives a cloud needs its keys.
        variables = dict(os.environ)
        self.environment = variables if cluster.is_private else environ.inheritable(variables)
        self.environment["SLURM_TIME_FORMAT"] = "standard"  # of squeue
        self._cluster = cluster
        self._on_end, self._on_notice = on_end, on_notice
        self._closing, self._gone = threading.Event(), threading.Event()
        for line in filter(None, (cluster.hold, cluster.run, cluster.down)):
            if shutil.which(word := shlex.split(line)[0]) is None:
                raise PoolStartError(
                    f"{cluster.name}: {word} is not on this machine's PATH: start the notebook "
                    "where it is, as on a login node."
                )
        self._output = io.FileIO(os.memfd_create("gpupool-hold"))
        if not cluster.hold:
            self._gone.set()
            self.hosts = hosts_of(cluster.hosts)
            return
        threading.Thread(target=self._hold, name="gpupool-hold", daemon=True).start()
        try:
            self.hosts = hosts_of(self._wait(say, is_stopped))
        except BaseException:
            self.close()
            raise

    def wrapped(self, host: str, command: Sequence[str]) -> list[str]:
        """How to run a command on a host, with its stdin and stdout here."""
        ranks = str(dict(self.hosts)[host] or "")
        words = self._split(self._cluster.run)
        words = [word.replace("{host}", host).replace("{ranks}", ranks) for word in words]
        return [*words, f"exec {shlex.join(command)}"]

    def close(self) -> None:
        """Give the hosts back; may be called again. After an interrupt it goes on without us."""
        self._closing.set()
        if self._gone.wait(4 * _END_S):
            self._output.close()

    def _wait(self, say: Progress, is_stopped: Callable[[], bool]) -> list[str]:
        ask_at = time.monotonic() + _ASK_S / 2  # they may be there at once
        while not self._gone.wait(_LOOK_S):
            if found := re.search(r"^gpupool (\S+)(.*)\n", self._said(), re.MULTILINE):
                self.job = found[1].strip("-")
                return found[2].split()
            if is_stopped():
                raise PoolError("the pool was stopped.")
            if time.monotonic() >= ask_at:
                who, (state, reason, start, _) = self._who(), self._state()
                stands = self._last_words() or "waiting"
                if state.startswith("PEND") and reason not in ("", "None"):
                    why = f"for {reason.lower()}" if reason.istitle() else f"({reason})"
                    stands = f"waiting {why}" + f", expected {_clock(start)}" * (start[:2] == "20")
                say(f"{who}: {stands}")
                ask_at = time.monotonic() + _ASK_S
        raise PoolStartError(f"{self._how_it_ended()}.")

    def _hold(self) -> None:
        """Start what holds the hosts, and wait for its end, or for `close`. The kernel ends it with
        this thread, so that nothing may be raised here."""
        try:
            process = subprocess.Popen(
                dying_with_us(shlex.split(self._cluster.hold)),
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                env=self.environment,
                start_new_session=True,  # the notebook's interrupt is not meant for it
            )
        except OSError as error:  # too many processes, or too long a line
            why = f"no process can be started ({error.strerror})"
            os.write(self._output.fileno(), why.encode())
            self._gone.set()
            return
        look_at = 0.0
        while not self._closing.wait(_WATCH_S) and process.poll() is None:
            if self.hosts and time.monotonic() >= look_at:
                look_at = time.monotonic() + _LIMIT_S
                with contextlib.suppress(Exception):  # whatever it is, they are not to go with it
                    end = self._state()[3]
                    left_s = (datetime.fromisoformat(end) - datetime.now()).total_seconds()
                    if left_s <= _NOTICE_S:
                        look_at = math.inf
                        text = f"ends at {_clock(end)}, in {left_s / 60:.0f} min"
                        self._on_notice(f"{self._who()} {text}")
        self._end(process)
        is_loss = bool(self.hosts) and not self._closing.is_set()
        words = self._how_it_ended() if is_loss else ""
        self._gone.set()
        if is_loss:
            self._on_end(words)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        is_killed = (process.poll() or 0) < 0
        process.stdin.close()
        ways = ((0, _END_S * bool(self.hosts)), (signal.SIGTERM, _END_S), (signal.SIGKILL, None))
        for number, wait_s in ways:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if number and process.poll() is None:
                    is_killed = True
                    os.killpg(process.pid, number)
                process.wait(wait_s)
        if self._who() and is_killed:
            self._ask(self._cluster.cancel)

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + _END_S
        who, (state, reason, *_) = self._who(), self._state()
        while state in _UNFINISHED and reason != "TimeLimit" and time.monotonic() < deadline:
            self._closing.wait(_WATCH_S)
            state, reason, *_ = self._state()
        if reason == "TimeLimit":  # the nodes may be being cleaned up
            state = "TIMEOUT"
        return f"{who} ended: {state or self._last_words() or 'without a word'}"

    def _who(self) -> str:
        if not self.job and "{job}" in self._cluster.cancel:
            found = _JOB.search(self._said())
            self.job = found[1] if found else ""
        return f"job {self.job}" if self.job else self._cluster.name

    def _state(self) -> tuple[str, str, str, str]:
        """State, reason, start and end of the job; "" for each that is not known."""
        lines = self._ask(self._cluster.state).splitlines() or [""]
        state, reason, start, end, *_ = [*map(_shown, lines[0].split("|")), "", "", ""]
        return state.upper(), reason, start, end

    def _ask(self, line: str) -> str:
        """What a command says; "" if it fails, or the job is not known that it is about."""
        if not line or ("{job}" in line and not self.job):
            return ""
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            return subprocess.run(
                self._split(line),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                env=self.environment,
            ).stdout
        return ""

    def _said(self) -> str:
        start = max(0, os.fstat(self._output.fileno()).st_size - _TAIL_BYTES)
        return os.pread(self._output.fileno(), _TAIL_BYTES, start).decode(errors="replace")

    def _last_words(self) -> str:
        """What is wrong, in the scheduler's words; else what it has said last."""
        lines = [line for line in self._said().splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return _shown("; ".join(errors or lines[-2:]))

    def _split(self, line: str) -> list[str]:
        return [word.replace("{job}", self.job) for word in shlex.split(line)]


def _shown(text: str) -> str:
    return without_passwords(plain(CODES.sub("", text.strip()))).rstrip(".")


def _clock(time: str) -> str:
    """The time of day, with the day if that is another one."""
    is_today = time.startswith(f"{datetime.now():%Y-%m-%d}")
    return time[11:16] if is_today else time[:16].replace("T", " ")
