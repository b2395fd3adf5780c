"""The processes of a pool on this host, forked by its starter. Runs on the client."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gpupool.core.errors import PoolError
from gpupool.core.machine.locks import ENDING
from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines
from gpupool.core.wire.starter import CONTROLLER, STARTER, process_of
from gpupool.pool.launchers import starter
from gpupool.pool.launchers.base import DIE_S, Launcher, OnExit, exit_reason
from gpupool.pool.launchers.placement import too_few

_CONTROLLER_PORTS = 20  # it takes 16 to 20; more of its own choice if these are not enough
# The starter reports deaths, sends signals and outlives nobody: neither ipyparallel's nanny (2 s a
# start) nor an engine's own watch on the controller is needed.
_ENGINE_ARGS = (
    "--IPEngine.enable_nanny=False",
    "--IPEngine.max_heartbeat_misses=0",
    "--IPEngine.wait_for_url_file=1",  # boot.py has waited
    "--log-level=40",  # its warnings speak of settings that are meant
)
_ANSWER_S = 60.0  # of a starter that still imports torch, from a slow disk
_PORTS = range(10_000, 32_000)  # above the well-known services, below those of connections


class Forked(Launcher):
    """Forked by the starter of this host."""

    def __init__(self, on_exit: OnExit) -> None:
        self._starter = starter.take()
        self.folder = Path(tempfile.mkdtemp(prefix="pool", dir=self._starter.folder))
        self.client_file = self.folder / "profile" / "security" / "ipcontroller-client.json"
        self.pids: dict[str, int] = {}
        self.preloaded = self._starter.preloaded
        self._on_exit = on_exit
        self._running: set[str] = set()
        self._unanswered = 0  # `Kill`s
        self._changed = threading.Condition()
        self._locked: lines.Locked | None = None  # the answer to the last `Lock`
        self._stopped = threading.Event()
        self._released = False  # the starter is no longer ours
        self._starter.on_event = self._on_event
        env = {**environ.inheritable(os.environ), "GPUPOOL_FOLDER": str(self._starter.folder)}
        self._starter.command(lines.Open(str(self.folder), env))
        # The last one is for what users' scripts listen at, at any time.
        *self._ports, self._master_port = free_ports(_CONTROLLER_PORTS + 1)

    def is_controller_up(self) -> bool:
        with contextlib.suppress(FileNotFoundError, ValueError):  # half of it may be there
            json.loads(self.client_file.read_text())
            return True
        return False

    def require_folder(self) -> None:
        if not self.client_file.exists():
            raise PoolError(
                f"the pool's private folder, {self.folder}, was removed, perhaps by a cleaner of "
                "temporary files. `%gpupool stop`, then `%gpupool start`, makes a new pool."
            )

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '')}.log"

    def lock_gpus(self, uuids: Sequence[str], number: int, force: bool) -> list[str]:
        # Those of a notebook that has ended are waited for, until its ranks are gone.
        deadline = time.monotonic() + DIE_S
        while True:
            self._locked = None
            self._starter.command(lines.Lock(list(uuids), number, force))
            self._wait(lambda: self._locked is not None, "did not answer")
            assert self._locked is not None
            if len(self._locked.devices) == number:
                return list(self._locked.devices)
            owners = self._locked.others
            is_ending = any(owner.endswith(ENDING) for owner in owners.values())
            if not is_ending or time.monotonic() >= deadline:
                whose = "; ".join(f"{uuid} by {owner}" for uuid, owner in owners.items())
                num_free = len(uuids) - len(owners)
                raise too_few(f"other pools use {whose}", num_free, len(uuids), number)
            time.sleep(0.05)

    def start_controller(self) -> None:
        ports = ",".join(map(str, self._ports))
        self._spawn(CONTROLLER, "gpupool.host.controller:main", [f"--ports={ports}"], {})

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        file = self.client_file.with_name("ipcontroller-engine.json")
        for rank in ranks:
            arguments = [f"--file={file}", f"--IPEngine.id={rank.rank}", *_ENGINE_ARGS]
            environment = engine_environment(rank, self._master_port)
            environment[environ.POOL_FOLDER] = str(self.folder)
            self._spawn(process_of(rank.rank), "gpupool.engine.boot:main", arguments, environment)

    def kill_engines(self, ranks: Iterable[int], *, waits: bool = True) -> None:
        names = list(map(process_of, ranks))
        self._starter.command(lines.Kill(names))
        with self._changed:
            self._unanswered += 1
        if waits:  # none can come after the answer, also not one whose start was interrupted
            self._wait(
                lambda: self._unanswered <= 0 and self._running.isdisjoint(names),
                "could not end the engines",
            )

    def stop(self, *, for_good: bool = False) -> None:
        if self._released or not self._starter.is_ours:
            return
        self._released = True
        if not for_good and self.preloaded.is_set():
            self._starter.command(lines.Stop())
            if self._stopped.wait(DIE_S):
                self._starter.on_event = lambda event: None  # it would keep this pool in memory
                starter.give_back(self._starter)
                return
        self._stopped.set()
        self._starter.close()

    def _spawn(self, name: str, target: str, argv: Sequence[str], env: dict[str, str]) -> None:
        if self._released:  # the starter may have another pool by now
            raise PoolError("the pool was stopped.")
        arguments = [*argv, f"--profile-dir={self.folder / 'profile'}"]
        self._starter.command(lines.Spawn(name, target, arguments, env, str(self.log_path(name))))

    def _wait(self, holds: Callable[[], bool], failure: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._stopped.is_set(), _ANSWER_S)
            if not holds():
                raise PoolError(f"the starter of the pool {failure}.")

    def _on_event(self, event: lines.Line) -> None:
        """Hear what the starter reports; called from its reader thread."""
        ended: lines.Exited | None = None
        with self._changed:
            match event:
                case lines.Locked():
                    self._locked = event
                case lines.Spawned(name, pid):
                    self.pids[name] = pid
                    self._running.add(name)
                case lines.Killed():
                    self._unanswered -= 1
                case lines.Exited(name) if name == STARTER:
                    # Its children have died with it, and not what they had started.
                    for pid in map(self.pids.__getitem__, self._running):
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(pid, signal.SIGKILL)  # each leads its own process group
                    ended = None if self._stopped.is_set() else event
                    self._stopped.set()
                case lines.Exited(name):
                    self._running.discard(name)
                    ended = event
                case lines.Stopped():
                    self._running.clear()
                    self._stopped.set()
            self._changed.notify_all()
        if ended is not None:
            self._on_exit(ended.name, exit_reason(ended.status, ended.cause), ended.log_tail)


def engine_environment(rank: Rank, master_port: int) -> dict[str, str]:
    """What an engine's environment has beyond the notebook's: its device, threads and rank.

    torchrun's names are set, so that scripts written for it find themselves at home. LOCAL_RANK is
    for them the number of the GPU to use: with one GPU to see it is 0 (as of `torchrun
    --virtual-local-rank`), without one it counts the ranks of the host. Nothing of ours listens at
    MASTER_PORT.
    """
    by_default = {
        "NCCL_DEBUG": "WARN",  # into the rank's log; pool/upkeep/forming.py quotes it
        # torch.compile starts so many processes: 32 a rank else
        "TORCHINDUCTOR_COMPILE_THREADS": str(rank.num_threads),
        # cuBLAS reads it once: for a training with deterministic=True that comes later
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if rank.gpu else {}),
    }
    return {
        "CUDA_VISIBLE_DEVICES": rank.gpu.uuid if rank.gpu else "",
        "OMP_NUM_THREADS": str(rank.num_threads),
        "TOKIO_WORKER_THREADS": str(rank.num_threads),  # of obstore; all cores of the machine else
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": "0" if rank.gpu else str(rank.rank),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": "gpupool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        environ.RANK: json.dumps(asdict(replace(rank, gpu=None))),
        # As `accelerate launch --cpu` does: it would leave CPU ranks alone, each on its own.
        **({} if rank.gpu else {"ACCELERATE_USE_CPU": "true"}),
        **environ.for_groups(os.environ),
        **{name: value for name, value in by_default.items() if name not in os.environ},
    }


def free_ports(number: int) -> list[int]:
    """So many ports of loopback in a row that nobody listens at now.

    They lie below those that the kernel gives to outgoing connections, and could give in between.
    """
    while True:
        # Not the random numbers that the user has seeded: two notebooks would choose the same.
        start = random.SystemRandom().choice(_PORTS)
        with contextlib.ExitStack() as listeners, contextlib.suppress(OSError):
            for port in range(start, start + number):
                listeners.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(start, start + number))
