"""The processes of a pool on the notebook's own host. Runs on the client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpupool.core.errors import PoolError
from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire import starter as lines
from gpupool.core.wire.starter import CONTROLLER
from gpupool.pool.launchers import starter
from gpupool.pool.launchers.base import DIE_S, Launcher, OnExit
from gpupool.pool.launchers.processes import Processes, free_ports

_CONTROLLER_PORTS = 20  # it takes 16 to 20; more of its own choice if these are not enough
_HERE = "127.0.0.1"


class Forked(Processes, Launcher):
    """Forked by the starter of this host."""

    def __init__(self, on_exit: OnExit) -> None:
        self._starter = starter.take()
        super().__init__(self._starter, on_exit)
        self.folder = tempfile.mkdtemp(prefix="pool", dir=self._starter.folder)
        self.client_file = Path(self.folder) / "profile" / "security" / "ipcontroller-client.json"
        self.engine_file = self.client_file.with_name(lines.CONNECTION_FILE)
        self.preloaded = self._starter.preloaded
        self._starter.command(lines.Open(self.folder, environ.inheritable(os.environ)))
        # The last one is for what users' scripts listen at, at any time.
        *self._ports, self._master_port = free_ports(_CONTROLLER_PORTS + 1)

    def is_controller_up(self) -> bool:
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

    def start_controller(self, address: str = _HERE, ports: Sequence[int] = ()) -> None:
        """Start ipyparallel's controller, which engines find at this address; returns at once."""
        listed = ",".join(map(str, ports or self._ports))
        arguments = [f"--ports={listed}", f"--IPController.engine_ip={address}"]
        self._spawn(CONTROLLER, "gpupool.host.controller:main", arguments, {}, {})

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        self.fork_engines(ranks, str(self.engine_file), (_HERE, self._master_port))

    def stop(self, *, for_good: bool = False) -> None:
        if self._released or not self._starter.is_ours:
            return
        self._released = True
        if not for_good and self.preloaded.is_set():
            self._starter.command(lines.Stop())
            if self._stopped.wait(DIE_S):
                self._starter.listen(lambda event: None)  # it would keep this pool in memory
                starter.give_back(self._starter)
                return
        self._stopped.set()
        self._starter.close()

    def _starter_ended(self) -> None:
        # Its children have died with it, and not what they had started.
        for pid in map(self.pids.__getitem__, self._running):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each leads its own process group
