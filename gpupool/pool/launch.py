"""Bring up the processes of a pool and hold the line to their agent. Runs on the client.

The agent (`gpupool/host/agent.py`) is the parent of the controller and of the engines. All files of
a pool lie in one private folder, which goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpupool.core import environ
from gpupool.core.topology import Rank

_STOP_TIMEOUT_S = 5.0

# The hub keeps no messages (--nodb) and hears of a new engine at its next heartbeat, so beats are
# quick; many may be missed, because an engine that computes holds its heart's thread up.
_CONTROLLER_ARGS = (
    "--nodb",
    "--log-level=30",
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=300",
)


class Launch:
    """The running processes of one pool, seen through their agent.

    `on_exit(name, status, log_tail)` is called from a background thread when a process ends.
    """

    def __init__(self, on_exit: Callable[[str, int, str], None]) -> None:
        # mkdtemp makes the folder for its owner alone (mode 0700); the agent's umask does the rest.
        self.folder = Path(tempfile.mkdtemp(prefix="gpupool-"))
        self.pids: dict[str, int] = {}
        self._on_exit = on_exit
        self._running: set[int] = set()
        self._stopped = threading.Event()
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "gpupool.host.agent", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environ.inheritable(os.environ),
            start_new_session=True,  # the notebook's interrupt is not meant for it
        )
        self._write_lock = threading.Lock()
        threading.Thread(target=self._read_events, name="gpupool-agent", daemon=True).start()

    @property
    def client_file(self) -> Path:
        """Where the controller writes what a client needs to connect."""
        return self.folder / "profile" / "security" / "ipcontroller-client.json"

    def is_controller_up(self) -> bool:
        """Whether the controller has written how to connect to it, to the last byte."""
        try:
            json.loads(self.client_file.read_text())
        except (FileNotFoundError, ValueError):  # it writes in place: half a file can be seen
            return False
        return True

    def log_path(self, name: str) -> Path:
        """The log of a process: of "controller", or of "rank 0", "rank 1" ..."""
        return self.folder / f"{name.replace(' ', '')}.log"

    def start_controller(self) -> None:
        """Start ipyparallel's controller, on loopback."""
        self._spawn("controller", ["ipyparallel.controller", *_CONTROLLER_ARGS], {})

    def start_engines(self, ranks: Sequence[Rank]) -> None:
        """Start one engine per rank. They wait for the controller by themselves."""
        engine_file = self.client_file.with_name("ipcontroller-engine.json")
        for rank in ranks:
            self._spawn(
                f"rank {rank.rank}",
                [
                    "gpupool.engine.boot",
                    f"--file={engine_file}",
                    f"--IPEngine.id={rank.rank}",
                    # the agent tells of deaths and sends signals; the nanny costs 2 s a start
                    "--IPEngine.enable_nanny=False",
                    "--IPEngine.wait_for_url_file=1",  # boot.py has waited
                    "--log-level=40",  # its warnings speak of settings that are meant
                ],
                engine_environment(rank),
            )

    def signal(self, rank: int, number: int = signal.SIGINT) -> None:
        """Send a signal to the engine of a rank."""
        self._command(op="signal", name=f"rank {rank}", signal=int(number))

    def stop(self) -> None:
        """End every process of the pool and remove its folder. May be called again."""
        if not self._stopped.is_set():
            self._command(op="stop")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(_STOP_TIMEOUT_S)
            self._agent.kill()  # its children die with it; no effect when it has ended
            self._agent.wait()
        with contextlib.suppress(BrokenPipeError):
            if self._agent.stdin:
                self._agent.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(self, name: str, module_args: list[str], env: dict[str, str]) -> None:
        argv = [sys.executable, "-m", *module_args, f"--profile-dir={self.folder / 'profile'}"]
        self._command(op="spawn", name=name, argv=argv, env=env, log=str(self.log_path(name)))

    def _command(self, **command: Any) -> None:
        assert self._agent.stdin is not None
        # A dead agent is told of by `_read_events`; here there is nobody left to command.
        with self._write_lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._agent.stdin.write(json.dumps(command) + "\n")
            self._agent.stdin.flush()

    def _read_events(self) -> None:
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            event = json.loads(line)
            if event["event"] == "spawned":
                self.pids[event["name"]] = event["pid"]
                self._running.add(event["pid"])
            elif event["event"] == "exited":
                self._running.discard(self.pids[event["name"]])
                self._on_exit(event["name"], event["status"], event["log_tail"])
            elif event["event"] == "stopped":
                self._stopped.set()
        self._agent.stdout.close()
        if not self._stopped.is_set():
            self._stopped.set()
            self._kill_groups()
            self._on_exit("agent", self._agent.wait(), "")

    def _kill_groups(self) -> None:
        """The agent was killed and its children died with it: end what those had started."""
        for pid in self._running:  # each is the leader of its own process group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def engine_environment(rank: Rank) -> dict[str, str]:
    """What an engine's environment has beyond the notebook's: its device, threads and rank.

    torchrun's names are set, so that scripts written for it find themselves at home.
    """
    env = {
        "CUDA_VISIBLE_DEVICES": rank.gpu.uuid if rank.gpu else "",
        "OMP_NUM_THREADS": str(rank.num_threads),
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "GPUPOOL_RANK": json.dumps({**asdict(rank), "gpu": rank.gpu and rank.gpu.name}),
        # One machine: neither backend needs to listen beyond loopback.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # A failed collective must raise, not end the process with the user's variables.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
    }
    if sys.platform != "linux":  # the loopback interface is called differently elsewhere
        del env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]
    return env


def exit_reason(status: int) -> str:
    """How a process ended, in words.

    >>> exit_reason(-9), exit_reason(1)
    ('was killed by SIGKILL', 'ended with exit status 1')
    """
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
