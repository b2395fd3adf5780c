"""The processes of a pool on this host, forked by its starter. Runs on the client.

The starter is the parent of the controller and of the engines, and removes the pool's private
folder with them. `engine_environment` says what each has in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gpupool.core.errors import PlacementError, PoolError
from gpupool.core.machine.locks import locked_text
from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines
from gpupool.core.wire.starter import CONTROLLER, STARTER, process_of
from gpupool.pool.launchers import starter
from gpupool.pool.launchers.base import DIE_S, OnExit, exit_reason
from gpupool.pool.launchers.ports import free_ports

_TORCHS_PORT = 29_500
_CONTROLLER_PORTS = 20  # it takes 16 to 20; more of its own choice if these are not enough
# The starter reports deaths, sends signals and outlives nobody: neither ipyparallel's nanny (2 s a
# start) nor an engine's own watch on the controller is needed.
_ENGINE_ARGS = (
    "--IPEngine.enable_nanny=False",
    "--IPEngine.max_heartbeat_misses=0",
    "--IPEngine.wait_for_url_file=1",  # boot.py has waited
    "--log-level=40",  # its warnings speak of settings that are meant
)

_STOP_S = 5.0  # of ranks without a GPU
_UNSEEN_S = 5.0  # how long a lock whose owner is not seen is waited for


class Forked:
    """A launcher: see `base.py`."""

    def __init__(self, on_exit: OnExit) -> None:
        with starter.uninterrupted():
            self._starter = starter.take()
            self._starter.num_pools += 1
        self.folder = self._starter.folder / f"pool{self._starter.num_pools}"
        self.pids: dict[str, int] = {}
        self.preloaded = self._starter.preloaded
        self._on_exit = on_exit
        self._running: dict[str, int] = {}
        self._changed = threading.Condition()
        self._locked: lines.Locked | None = None  # the answer to the last `Lock`
        self._killed = False  # the last `Kill` was answered
        self._stopped = threading.Event()
        self._released = False  # the starter is no longer ours
        self._ends_within_s = _STOP_S
        self._starter.on_event = self._on_event
        ours = {"GPUPOOL_FOLDER": str(self._starter.folder)}
        try:
            self.folder.mkdir(mode=0o700)
            env = {**environ.inheritable(os.environ), **ours}
            self._starter.command(lines.Open(str(self.folder), env))
        except BaseException:  # its folder is gone, say, and another starter may do better
            self._starter.close()
            raise
        self._ports = free_ports(_CONTROLLER_PORTS + 1)
        # The last one is for what users' scripts listen at, at any time.
        self._port = self._ports[-1] if self._ports else _TORCHS_PORT

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

    @property
    def _engine_file(self) -> Path:
        return self.client_file.with_name("ipcontroller-engine.json")

    def require_folder(self) -> None:
        """Raise PoolError if the private folder of a pool that is up was removed."""
        if not self._engine_file.exists():
            raise PoolError(
                f"the pool's private folder, {self.folder}, or files in it were removed, perhaps "
                "by a cleaner of temporary files. `%gpupool stop`, then `%gpupool start`, makes a "
                "new pool."
            )

    def log_path(self, name: str) -> Path:
        """The log of a process: of "controller", or of "rank 0", "rank 1" ..."""
        return self.folder / f"{name.replace(' ', '')}.log"

    def lock_gpus(self, uuids: Sequence[str], number: int, force: bool) -> list[str]:
        """Lock `number` of these GPUs until the pool ends; returns which.

        Waits for those of a notebook of this user that has ended, until its ranks are gone.

        Raises:
            PlacementError: other pools have locked too many of them; it names their owners.
        """
        began = time.monotonic()
        while True:
            locked = self._ask_for_locks(uuids, number, force)
            if len(locked.devices) == number:
                return list(locked.devices)
            owners = locked.others.values()
            is_ending = any(owner.get("is_ending") for owner in owners)
            # Not seen is who has ended just now, before its ranks, or is outside of this container.
            wait_s = DIE_S if is_ending else 0.0 if all(owners) else _UNSEEN_S
            if time.monotonic() - began >= wait_s:
                raise PlacementError(locked_text(locked.others, len(uuids), number))
            time.sleep(0.05)

    def _ask_for_locks(self, uuids: Sequence[str], number: int, force: bool) -> lines.Locked:
        self._locked = None
        self._starter.command(lines.Lock(list(uuids), number, force))
        self._wait(lambda: self._locked is not None, "did not answer", self._starter.reply_s)
        assert self._locked is not None
        if self._locked.error:
            raise PlacementError(f"the GPUs cannot be locked: {self._locked.error}.")
        return self._locked

    def start_controller(self) -> None:
        """Start ipyparallel's controller, on loopback."""
        ports = ",".join(map(str, self._ports[:_CONTROLLER_PORTS]))
        arguments = [f"--ports={ports}"] if ports else []
        self._spawn(CONTROLLER, "gpupool.host.controller:main", arguments, {})

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        """Start one engine per rank. They wait for the controller by themselves."""
        for rank in ranks:
            if rank.gpu is not None:
                self._ends_within_s = DIE_S
            arguments = [f"--file={self._engine_file}", f"--IPEngine.id={rank.rank}", *_ENGINE_ARGS]
            environment = engine_environment(rank, self._port)
            name = process_of(rank.rank)
            self._spawn(name, "gpupool.engine.boot:main", arguments, environment)

    def signal(self, rank: int, number: int = signal.SIGINT) -> None:
        """Send a signal to the engine of a rank."""
        self._starter.command(lines.Signal(process_of(rank), int(number)))

    def kill_engines(self, ranks: Iterable[int]) -> None:
        """Kill the engines of these ranks and wait until they are gone."""
        names = set(map(process_of, ranks))
        self._killed = False
        self._starter.command(lines.Kill(sorted(names)))
        # none can come after the answer, also not one whose start was cut off by an interrupt
        self._wait(lambda: self._killed, "did not answer", self._starter.reply_s)
        self._wait(lambda: not names & self._running.keys(), "could not end the engines", DIE_S)

    def stop(self, *, for_good: bool = False) -> None:
        """End every process of the pool and remove its folder. May be called again.

        Args:
            for_good: end the starter too, which may be what is wrong.
        """
        if self._released or not self._starter.is_ours:
            return
        self._released = True
        if not for_good and self.preloaded.is_set():
            self._starter.command(lines.Stop())
            if self._stopped.wait(self._ends_within_s):
                self._starter.on_event = lambda event: None  # it would keep this pool in memory
                starter.give_back(self._starter)
            else:  # it is stopped itself, or stuck
                self._stopped.set()
                self._starter.kill()
        else:
            self._stopped.set()
            self._starter.close()

    def _spawn(self, name: str, target: str, argv: Sequence[str], env: dict[str, str]) -> None:
        if self._released:  # the starter may have another pool by now
            raise PoolError("the pool was stopped.")
        arguments = [*argv, f"--profile-dir={self.folder / 'profile'}"]
        self._starter.command(lines.Spawn(name, target, arguments, env, str(self.log_path(name))))

    def _wait(self, holds: Callable[[], bool], failure: str, within_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._stopped.is_set(), within_s)
            if not holds():
                raise PoolError(f"the starter (pid {self._starter.pid}) {failure}.")

    def _on_event(self, event: lines.Event) -> None:
        """Hear what the starter reports; called from its reader thread."""
        with self._changed:
            match event:
                case lines.Locked():
                    self._locked = event
                case lines.Killed():
                    self._killed = True
                case lines.Spawned(name, pid):
                    self.pids[name] = self._running[name] = pid
                case lines.Exited(name) if name == STARTER:
                    self._kill_groups()
                    was_stopped = self._stopped.is_set()
                    self._stopped.set()
                case lines.Exited(name):
                    self._running.pop(name, None)
                case lines.Stopped():
                    self._running.clear()
                    self._stopped.set()
            self._changed.notify_all()
        match event:
            case lines.Exited(name, status, cause, log_tail):
                if name != STARTER or not was_stopped:
                    self._on_exit(name, exit_reason(status, cause), log_tail)

    def _kill_groups(self) -> None:
        """The starter was killed and its children died with it: end what those had started."""
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each leads its own process group


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
    }
    return {
        "CUDA_VISIBLE_DEVICES": rank.gpu.uuid if rank.gpu else "",
        "OMP_NUM_THREADS": str(rank.num_threads),
        "TOKIO_WORKER_THREADS": str(rank.num_threads),  # of obstore; all cores of the machine else
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": "0" if rank.gpu else str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": "gpupool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        environ.RANK: json.dumps(asdict(replace(rank, gpu=None))),
        # cuBLAS reads it once: for a training with deterministic=True that comes later.
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if rank.gpu and _is_cublas_free() else {}),
        # As `accelerate launch --cpu` does: it would leave CPU ranks alone, each on its own.
        **({} if rank.gpu else {"ACCELERATE_USE_CPU": "true"}),
        **environ.for_groups(os.environ),
        **{name: value for name, value in by_default.items() if name not in os.environ},
    }


def _is_cublas_free() -> bool:
    """Whether the user leaves it to us how cuBLAS divides its memory."""
    return "CUBLAS_WORKSPACE_CONFIG" not in os.environ
