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
from gpupool.pool.launchers.base import OnExit
from gpupool.pool.launchers.processes import Processes, free_ports
from gpupool.pool.status import HostInfo

_CONTROLLER_PORTS = 20  # it takes 16 to 20; more of its own choice if these are not enough


class Forked(Processes):
    """Forked by the starter of this host; what a pool asks of who starts its processes.

    `client_file` is what a client needs to connect to the controller, which engines find at
    `address`. When `preloaded` is set, engines can be started without waiting for torch. `down` is
    the command line that ends machines which outlast the pool, if they do.
    """

    address = "127.0.0.1"
    down = ""

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
        """Whether its files are there, to the last byte."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # half of one may be there
            for file in (self.client_file, self.engine_file):
                json.loads(file.read_text())
            return True
        return False

    def require_folder(self) -> None:
        """Raise PoolError if the folder was removed."""
        if not self.client_file.exists():
            raise PoolError(
                f"the pool's private folder, {self.folder}, was removed, perhaps by a cleaner of "
                "temporary files. `%gpupool stop`, then `%gpupool start`, makes a new pool."
            )

    def folder_of(self, rank: int) -> str:
        """The pool's private folder on the host of a rank."""
        return self.folder

    def hosts(self) -> Sequence[HostInfo]:
        """The hosts as they are now; none where all processes are on this one."""
        return ()

    def start_controller(self) -> None:
        """Start ipyparallel's controller; returns at once."""
        ports = ",".join(map(str, self._ports))
        arguments = [f"--ports={ports}", f"--IPController.engine_ip={self.address}"]
        self._spawn(CONTROLLER, "gpupool.host.controller:main", arguments, {}, {})

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        """Start an engine for each of these ranks, new ones too; returns at once."""
        self.fork_engines(ranks, str(self.engine_file), (self.address, self._master_port))

    def _give_back(self) -> bool:
        self.line.listen(lambda event: None)  # it would keep this pool in memory
        starter.give_back(self._starter)
        return True

    def _starter_ended(self) -> None:
        # Its children have died with it, and not what they had started.
        for pid in map(self.pids.__getitem__, self._running):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each leads its own process group
