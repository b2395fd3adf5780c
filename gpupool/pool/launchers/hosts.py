"""The processes of a pool on several hosts: an agent on each, the controller here. On the client.

An agent is a starter (`gpupool/host/starter.py`) that ssh, srun or their like have started; what
they connect is its line. Both ends ping: a host that is not heard is lost.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from gpupool.core.errors import PlacementError, PoolError, PoolStartError
from gpupool.core.formatting import format_ranks
from gpupool.core.machine import network
from gpupool.core.machine.processes import command_for, versions
from gpupool.core.machine.topology import Discovery, Gpu, GpuProcess, Rank
from gpupool.core.options.clusters import Cluster
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.wire import starter as lines
from gpupool.core.wire.starter import STARTER, process_of
from gpupool.pool.launchers.allocation import Allocation
from gpupool.pool.launchers.placement import Placement, Site, place_on
from gpupool.pool.launchers.processes import Forked, OnExit, Processes, exit_reason
from gpupool.pool.launchers.starter import ARGUMENTS, Line
from gpupool.pool.notices import NoticeLines, Progress
from gpupool.pool.status import HostInfo

_PING_S = 2.0
_SILENCE_S = 10.0  # then a host is lost; ssh itself takes 8 s to notice a cut cable, srun 33 s
_RETURN_S = 60.0  # for a host to come back
_TRY_AGAIN_S = 2.0
_HERE = "the notebook's machine"


class Agent(Processes):
    """The processes of a pool on another host, by its agent."""

    def __init__(self, name: str, line: Line, on_exit: OnExit) -> None:
        self.who = f"host {name}"
        self.ranks: set[int] = set()  # that were asked for
        self._num_unheard = 0  # pings, since it was heard last
        super().__init__(line, on_exit)

    @property
    def is_lost(self) -> bool:
        return self._stopped.is_set()

    def hello(self, limit_s: float) -> lines.Hello:
        """What it says of its host; a PoolError says why it does not."""
        self._wait(lambda: lines.Hello in self._answers, limit_s)
        hello: lines.Hello = self._answers[lines.Hello]
        return hello

    def reach(self, targets: Mapping[str, network.Listened]) -> lines.Reached:
        return self._ask(lines.Reach(targets), lines.Reached)

    def open(self, text: str, path: str = "", before: str = "") -> None:
        """Have it make the pool's folder, with the connection file in it; see `lines.Open`."""
        opened = self._ask(lines.Open("", {}, text, path, before), lines.Opened)
        if opened.why:
            raise PoolError(
                f"{self.who} does not see this home ({opened.why}). What crosses its line can be "
                "read on the network, so the keys of the pool go by a file of a home that both "
                "have. In gpupool.toml via = 'ssh' encrypts; is_private says that your `run` does."
            )
        self.folder = opened.folder

    def look(self) -> None:
        """Ping it; lose it if it was not heard for long."""
        if self._num_unheard * _PING_S >= _SILENCE_S:
            self.why_ended = f"has not answered for {_SILENCE_S:.0f} s"
            self.line.kill()
        else:
            # Counted, as a notebook whose own threads stand still hears nobody.
            self._num_unheard += 1
            self.line.command(lines.Ping())

    def _on_event(self, event: lines.Line) -> None:
        self._num_unheard = 0
        if isinstance(event, lines.Exited) and event.name == STARTER and not self.why_ended:
            said = event.log_tail.strip().splitlines()
            how = said[-1].rstrip(".") if said else f"its starter {exit_reason(event.status)}"
            self.why_ended = f"cannot be used: {how}"
        super()._on_event(event)

    def _report(self, event: lines.Exited) -> None:
        if event.name == STARTER:
            for rank in sorted(self.ranks):
                self._on_exit(process_of(rank), f"was lost: {self.who} {self.why_ended}", "")
        else:
            super()._report(event)


class Hosts(Forked):
    """The controller here, and an agent on each host, which the cluster's command lines start.

    The end of their job is reported as that of a process, "job 4711".
    """

    def __init__(self, cluster: Cluster, options: PoolOptions, on_exit: OnExit) -> None:
        super().__init__(on_exit)
        self._cluster, self.down = cluster, cluster.down
        self._options = replace(options, n=cluster.n)  # which a table may say
        self._agents: dict[str, Agent] = {}
        self._ranks: tuple[Rank, ...] = ()
        self._over = threading.Event()  # no host comes back
        self._allocation: Allocation | None = None

    def place(self, progress: Progress) -> Placement:
        """Get the hosts, find how they reach each other, and place the ranks. Raises as
        `placement.place_ranks`; a PoolError names a host that will not do."""
        self._allocation = Allocation(
            self._cluster, progress, self._over.is_set, self._note_end, NoticeLines()
        )
        hosts = self._allocation.hosts
        progress(f"reaching {len(hosts)} hosts")
        self._agents = {name: self._agent(name) for name, _ in hosts}
        threading.Thread(target=self._watch, name="gpupool-hosts", daemon=True).start()
        late = time.monotonic() + self._options.timeout_s
        hellos = {n: agent.hello(late - time.monotonic()) for n, agent in self._agents.items()}
        for name, hello in hellos.items():
            _check_versions(name, hello)
        addresses = self._addresses(hellos)
        _, self.address = addresses.pop(_HERE)
        sites = []
        for name, num_ranks in hosts:
            lock = partial(self._agents[name].lock_gpus, force=self._options.force)
            found, cores = _discovery(hellos[name]), hellos[name].num_cores
            sites.append(Site(lock, found, cores, name, *addresses[name], num_ranks))
        placement = place_on(self._options, sites)
        self._ranks = placement.ranks
        return placement

    # ---- what a pool asks of its launcher ------------------------------------------------

    def folder_of(self, rank: int) -> str:
        return self._agents[self._ranks[rank].host].folder

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        late = time.monotonic() + self._options.timeout_s
        while not self.is_controller_up() and time.monotonic() < late:
            time.sleep(0.01)
        for name, there in _by_host(ranks).items():
            if self._agents[name].is_lost:
                self._bring_back(name)
            agent = self._agents[name]
            if not agent.folder:
                self._open(agent)
            agent.ranks |= {one.rank for one in there}
            file = f"{agent.folder}/{lines.CONNECTION_FILE}"
            agent.fork_engines(there, file, (self._ranks[0].address, self._master_port))

    def kill_engines(self, ranks: Iterable[int], *, waits: bool = True) -> None:
        for name, there in _by_host(self._ranks[rank] for rank in ranks).items():
            if not self._agents[name].is_lost:
                self._agents[name].kill_engines([one.rank for one in there], waits=waits)

    def hosts(self) -> Sequence[HostInfo]:
        found = []
        for name, there in _by_host(self._ranks).items():
            agent = self._agents[name]
            state = f"lost: {agent.why_ended}" if agent.is_lost else "up"
            ranks = format_ranks(one.rank for one in there)
            gpus = Counter(one.gpu.name for one in there if one.gpu)
            counted = ", ".join(f"{number} × {gpu}" for gpu, number in gpus.items())
            address = f"{there[0].address} ({there[0].interface})"
            found.append(HostInfo(name, state, ranks, counted, address))
        return found

    def stop(self, *, for_good: bool = False) -> None:
        self._over.set()
        # As Python ends no thread can be had: then one after the other.
        with suppress(RuntimeError), ThreadPoolExecutor(max(1, len(self._agents))) as threads:
            list(threads.map(Agent.stop, self._agents.values()))
        for agent in self._agents.values():
            agent.stop()
        super().stop(for_good=for_good)
        if self._allocation is not None:
            self._allocation.close()

    # ---- inside --------------------------------------------------------------------------

    def _agent(self, name: str) -> Agent:
        python = self._cluster.python or sys.executable
        starter = command_for("gpupool.host.starter", python)
        command = [*starter, self._cluster.network, "0", *ARGUMENTS]
        assert self._allocation is not None
        line = Line(self._allocation.wrapped(name, command), self._allocation.environment)
        agent = Agent(name, line, self._on_exit)
        agent.pids = self.pids
        return agent

    def _addresses(self, hellos: Mapping[str, lines.Hello]) -> dict[str, tuple[str, str]]:
        """Name of a host -> interface and address of it that all reach."""
        listeners, here = network.listen(self._cluster.network)
        listens = {_HERE: here, **{name: hello.listens_at for name, hello in hellos.items()}}
        try:
            with ThreadPoolExecutor(len(hellos)) as threads:
                reached = threads.map(lambda name: self._agents[name].reach(listens), hellos)
                failed = {name: one.failed for name, one in zip(hellos, reached, strict=True)}
        finally:
            for listener in listeners:
                listener.close()
        return network.choose(listens, failed)

    def _open(self, agent: Agent, before: str = "") -> None:
        """Have an agent make its folder; keys cross only what nobody can read."""
        text = self.engine_file.read_text()
        if self._cluster.is_private:
            agent.open(text, before=before)
        else:
            # mkstemp(3): for this user alone, on whatever host the home is seen
            with tempfile.NamedTemporaryFile("w", prefix=".gpupool-", dir=Path.home()) as file:
                file.write(text)
                file.flush()
                agent.open("", file.name, before)

    def _bring_back(self, name: str) -> None:
        """Reach a host again that was lost, with all that its ranks need but themselves; a
        PoolError if it does not come back in time, or not as it was."""
        gpus = [one.gpu.uuid for one in self._ranks if one.host == name and one.gpu]
        before = self._agents[name].folder
        late = time.monotonic() + _RETURN_S
        while True:
            self._agents[name].stop()
            if self._over.is_set():
                raise PoolError(f"host {name} is gone.")
            agent = self._agents[name] = self._agent(name)
            try:
                agent.hello(max(1.0, min(_SILENCE_S, late - time.monotonic())))
                # its last agent may still have them, for a moment
                agent.lock_gpus(gpus, len(gpus), self._options.force)
                return self._open(agent, before)
            except (PoolError, PlacementError):
                if time.monotonic() > late:
                    raise
            self._over.wait(_TRY_AGAIN_S)

    def _watch(self) -> None:
        while not self._over.wait(_PING_S):
            for agent in list(self._agents.values()):
                if not agent.is_lost:
                    agent.look()

    def _note_end(self, words: str) -> None:
        if not self._over.is_set():
            self._over.set()
            job, _, how = words.partition(" ended")
            self._on_exit(job, f"ended{how}", "")


def _by_host(ranks: Iterable[Rank]) -> dict[str, list[Rank]]:
    """Host -> those of its ranks, in order."""
    return {host: list(there) for host, there in groupby(ranks, attrgetter("host"))}


def _discovery(hello: lines.Hello) -> Discovery:
    gpus = []
    for plain in hello.gpus["gpus"]:
        processes = tuple(GpuProcess(**one) for one in plain["processes"])
        gpus.append(Gpu(**{**plain, "processes": processes}))
    return Discovery(tuple(gpus), hello.gpus["why_none"])


def _check_versions(name: str, hello: lines.Hello) -> None:
    for package, version in versions().items():
        there = hello.versions.get(package)
        if there != version:
            raise PoolStartError(
                f"{package}: host {name} has {there or 'none'}, and this notebook {version}. They "
                "have to be the same: `python` in gpupool.toml names the Python of the hosts."
            )
