"""The processes of a pool on one host, which its starter forks. Runs on the client."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from gpupool.core.errors import PoolError
from gpupool.core.machine.locks import ENDING
from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines
from gpupool.core.wire.starter import CONTROLLER, STARTER, process_of
from gpupool.pool.launchers import starter
from gpupool.pool.launchers.placement import too_few
from gpupool.pool.launchers.starter import Line
from gpupool.pool.status import HostInfo

DIE_S = 20.0
"""From SIGKILL to the end of a process, at most: the driver takes back 80 GB that it had mapped."""

OnExit = Callable[[str, str, str], None]
"""Hears of each end, in a background thread: name of the process, how it ended, end of its log."""

# The starter reports deaths, sends signals and outlives nobody: neither ipyparallel's nanny (2 s a
# start) nor an engine's own watch on the controller is needed.
_ENGINE_ARGS = (
    "--IPEngine.enable_nanny=False",
    "--IPEngine.max_heartbeat_misses=0",
    "--IPEngine.wait_for_url_file=1",  # boot.py has waited
    "--log-level=40",  # its warnings speak of settings that are meant
)
_ANSWER_S = 60.0  # of a starter that still imports torch, from a slow disk
_PORTS = range(10_000, 32_000)  # above the known services, below those that connections may get
_CONTROLLER_PORTS = 20  # it takes 16 to 20; more of its own choice if these are not enough

_Answer = TypeVar("_Answer", bound=lines.Line)


class Processes:
    """The processes of a pool on one host; `folder` is the pool's private one there."""

    folder = ""
    who = "the starter of the pool"

    def __init__(self, line: Line, on_exit: OnExit) -> None:
        self.line = line
        self.pids: dict[str, int] = {}
        self._on_exit = on_exit
        self._running: set[str] = set()
        self._unanswered = 0  # `Kill`s
        self._changed = threading.Condition()
        self._answers: dict[type[Any], Any] = {}  # the last one of each kind
        self._asking = threading.Lock()
        self.why_ended = ""  # if the starter did, unasked
        self._stopped = threading.Event()
        self._released = False  # the starter is no longer ours
        line.listen(self._on_event)

    def lock_gpus(self, uuids: Sequence[str], number: int, force: bool) -> list[str]:
        """Lock `number` of these GPUs for the pool, and say which; PlacementError names owners."""
        # Those of a notebook that has ended are waited for, until its ranks are gone.
        deadline = time.monotonic() + DIE_S
        lock = lines.Lock(list(uuids), number, force)
        while True:
            locked = self._ask(lock, lines.Locked)
            if len(locked.devices) == number:
                return list(locked.devices)
            owners = locked.others
            is_ending = any(owner.endswith(ENDING) for owner in owners.values())
            if not is_ending or time.monotonic() >= deadline:
                whose = "; ".join(f"{uuid} by {owner}" for uuid, owner in owners.items())
                num_free = len(uuids) - len(owners)
                raise too_few(f"other pools use {whose}", num_free, len(uuids), number)
            time.sleep(0.05)

    def fork_engines(self, ranks: Iterable[Rank], file: str, master: tuple[str, int]) -> None:
        """Start engines, which find the controller by this file; scripts find other ranks at this
        `master`. Returns at once."""
        for rank in ranks:
            arguments = [f"--file={file}", f"--IPEngine.id={rank.rank}", *_ENGINE_ARGS]
            name, target = process_of(rank.rank), "gpupool.engine.boot:main"
            self._spawn(name, target, arguments, *engine_environment(rank, *master))

    def kill_engines(self, ranks: Iterable[int], *, waits: bool = True) -> None:
        """Kill the engines of these ranks; returns when none is there, nor will be, or at once."""
        names = list(map(process_of, ranks))
        self.line.command(lines.Kill(names))
        with self._changed:
            self._unanswered += 1
        if waits:  # none can come after the answer, also not one whose start was interrupted
            self._wait(lambda: self._unanswered <= 0 and self._running.isdisjoint(names))

    def stop(self, *, for_good: bool = False) -> None:
        """End every process; `for_good`: the starter as well, at once. May be called again."""
        if self._released or not self.line.is_ours:
            return
        self._released = True
        if not for_good and self.line.preloaded.is_set():
            self.line.command(lines.Stop())
            if self._stopped.wait(DIE_S):  # no process is left but the starter
                self.line.release()
                return
        self._stopped.set()
        self.line.close()

    def _spawn(
        self,
        name: str,
        target: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        defaults: Mapping[str, str],
    ) -> None:
        if self._released:  # the starter may have another pool by now
            raise PoolError("the pool was stopped.")
        arguments = [*argv, f"--profile-dir={self.folder}/profile"]
        log = f"{self.folder}/{lines.log_of(name)}"
        self.line.command(lines.Spawn(name, target, arguments, env, log, defaults))

    def _ask(self, command: lines.Line, kind: type[_Answer]) -> _Answer:
        with self._asking:
            self._answers.pop(kind, None)
            self.line.command(command)
            self._wait(lambda: kind in self._answers)
            answer: _Answer = self._answers[kind]
            return answer

    def _wait(self, holds: Callable[[], bool], limit_s: float = _ANSWER_S) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._stopped.is_set(), limit_s)
            if not holds():
                raise PoolError(f"{self.who} {self.why_ended or 'does not answer'}.")

    def _on_event(self, event: lines.Line) -> None:
        """Called from the reader thread of the line."""
        ended: lines.Exited | None = None
        with self._changed:
            self._answers[type(event)] = event
            match event:
                case lines.Spawned(name, pid):
                    self.pids[name] = pid
                    self._running.add(name)
                case lines.Killed():
                    self._unanswered -= 1
                case lines.Exited(name) if name == STARTER:
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
            self._report(ended)

    def _report(self, event: lines.Exited) -> None:
        self._on_exit(event.name, exit_reason(event.status, event.cause), event.log_tail)


class Forked(Processes):
    """Forked by the starter of this host; what a pool asks of who starts its processes.

    `client_file` is what a client needs to connect to the controller, which engines find at
    `address`. When `preloaded` is set, engines can be started without waiting for torch. `down` is
    the command line that ends machines which outlast the pool, if they do.
    """

    address = "127.0.0.1"
    down = ""

    def __init__(self, on_exit: OnExit) -> None:
        super().__init__(line := starter.take(), on_exit)
        self.folder = tempfile.mkdtemp(prefix="pool", dir=line.folder)
        self.client_file = Path(self.folder) / "profile" / "security" / "ipcontroller-client.json"
        self.engine_file = self.client_file.with_name(lines.CONNECTION_FILE)
        self.preloaded = line.preloaded
        line.command(lines.Open(self.folder, environ.inheritable(os.environ)))
        # The last one is for what users' scripts listen at, at any time.
        *self._ports, self._master_port = free_ports(_CONTROLLER_PORTS + 1)

    def is_controller_up(self) -> bool:
        """Whether its files are there, to the last byte."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # half of one may be there
            for file in (self.client_file, self.engine_file):
                json.loads(file.read_text())
            return True
        return False

    def require_folder(self) -> None:
        if not self.client_file.exists():
            raise PoolError(
                f"the pool's private folder, {self.folder}, was removed, perhaps by a cleaner of "
                "temporary files. `%gpupool stop`, then `%gpupool start`, makes a new pool."
            )

    def folder_of(self, rank: int) -> str:
        return self.folder

    def hosts(self) -> Sequence[HostInfo]:
        """The hosts as they are now; none where all processes are on this one."""
        return ()

    def start_controller(self) -> None:
        ports = ",".join(map(str, self._ports))
        arguments = [f"--ports={ports}", f"--IPController.engine_ip={self.address}"]
        self._spawn(CONTROLLER, "gpupool.host.controller:main", arguments, {}, {})

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        self.fork_engines(ranks, str(self.engine_file), (self.address, self._master_port))

    def _on_event(self, event: lines.Line) -> None:
        if isinstance(event, lines.Exited) and event.name == STARTER:
            # Its children have died with it, and not what they had started.
            for pid in map(self.pids.__getitem__, self._running):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # each leads its own process group
        super()._on_event(event)


def engine_environment(
    rank: Rank, master_address: str, master_port: int
) -> tuple[dict[str, str], dict[str, str]]:
    """What an engine's environment has beyond its host's, and what it has where that has none.

    torchrun's names are set, so that scripts written for it find themselves at home. LOCAL_RANK is
    for them the number of the GPU to use: with one GPU to see it is 0 (as of `torchrun
    --virtual-local-rank`), without one it counts the ranks of the host. Nothing of ours listens at
    MASTER_PORT.
    """
    groups, by_default = environ.for_groups(rank.interface if rank.num_nodes > 1 else "")
    return {
        "CUDA_VISIBLE_DEVICES": rank.gpu.uuid if rank.gpu else "",
        "OMP_NUM_THREADS": str(rank.num_threads),
        "TOKIO_WORKER_THREADS": str(rank.num_threads),  # of obstore; all cores of the machine else
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": "0" if rank.gpu else str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(rank.num_nodes),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": "gpupool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        environ.RANK: json.dumps(asdict(replace(rank, gpu=None))),
        # As `accelerate launch --cpu` does: it would leave CPU ranks alone, each on its own.
        **({} if rank.gpu else {"ACCELERATE_USE_CPU": "true"}),
        **groups,
    }, {
        # torch.compile starts so many processes: 32 a rank else
        "TORCHINDUCTOR_COMPILE_THREADS": str(rank.num_threads),
        # cuBLAS reads it once: for a training with deterministic=True that comes later
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if rank.gpu else {}),
        **by_default,
    }


def free_ports(number: int) -> list[int]:
    """So many ports of loopback in a row that nobody listens at now."""
    while True:
        # Not the random numbers that the user has seeded: two notebooks would choose the same.
        start = random.SystemRandom().choice(_PORTS)
        ports = list(range(start, start + number))
        with contextlib.ExitStack() as listeners, contextlib.suppress(OSError):
            for port in ports:
                listeners.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports


def exit_reason(status: int, cause: str = "") -> str:
    """How a process ended, in words.

    >>> exit_reason(-9, "out of host memory"), exit_reason(1)
    ('was killed by SIGKILL (out of host memory)', 'ended with exit status 1')
    """
    words = f" ({cause})" if cause else ""
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by {known.get(-status, f'signal {-status}')}{words}"
    return f"ended with exit status {status}{words}"
