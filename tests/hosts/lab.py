"""Three hosts on this machine, for as long as a test has them.

`login` is where the notebook runs; `node1` and `node2` have an sshd; a switch joins them. Each is a
set of namespaces with its own network, name, processes, temporary files and home; this Python and
the sources are on all. Nothing of the machine is changed; all of a host ends with its first
process, and that with this one. Two traps are there: a host's own name has an address of loopback
in /etc/hosts, as Debian gives it, and docker0 has the same address on all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import until

ROOT = Path(__file__).parents[2]
ADDRESSES = {"login": "10.77.0.10", "node1": "10.77.0.11", "node2": "10.77.0.12"}
NODES = ("node1", "node2")
HOME = Path("/root")
OWN = Path("/run/lab")  # the lab's files on each host
_COVERED = (HOME, *map(Path, ("/dev/shm", "/run", "/var/spool", "/tmp")))  # the stage is in /tmp
_SPACES = "unshare --mount --uts --ipc --net --pid --fork --mount-proc --kill-child"
_VARIABLES = (
    f"HOME={HOME} USER=root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "
    f"SLURM_CONF={OWN}/slurm.conf OMPI_MCA_oob_tcp_if_include=eth0 "
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
)
_OF_A_HOST = f"""
mkdir -p /run/sshd /run/lock /run/munge {OWN}
mkdir -m 700 /tmp/gpupool-0  # what torch compiles lasts
mknod {OWN}/gpu0 c 1 3
mknod {OWN}/gpu1 c 1 3
ip link set lo up
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
"""
_SSHD = f"""
HostKey {OWN}/host_key
AuthorizedKeysFile {OWN}/key.pub
PermitRootLogin yes
"""
_SSH = f"IdentityFile {OWN}/key\nUserKnownHostsFile {OWN}/known_hosts\n"
_SLURM = f"""
ClusterName=lab
SlurmctldHost=login({ADDRESSES["login"]})
SlurmUser=root
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
PartitionName=gpu Nodes=ALL Default=YES MaxTime=60 State=UP
NodeName=node[1-2] NodeAddr=10.77.0.1[1-2] CPUs=8 RealMemory=1000 Gres=gpu:2
"""


def need(*programs: str) -> None:
    if missing := [program for program in programs if shutil.which(program) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make hosts installs them")


class Lab:
    """The hosts; `close` ends them. With Slurm all have the same files in their home."""

    def __init__(self, with_slurm: bool = False) -> None:
        if sys.platform != "linux" or os.getuid() != 0:
            pytest.skip("needs hosts of its own, which only root on Linux can make")
        need("unshare", "nsenter", "ip", "ss", "ps", "ssh-keygen", "/usr/sbin/sshd")
        self.folder = Path(tempfile.mkdtemp(prefix="gpupool-lab-", dir="/tmp"))
        self.pids: dict[str, int] = {}  # of the first process of each host, and of the switch
        self._first: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[Any]] = []
        self._then: dict[str, set[str]] = {}
        try:
            self._start("switch", "unshare --net", ["ip link add br0 up type bridge"])
            for host in ADDRESSES:
                self._start_host(host, shares_home=with_slurm)
            self._start_sshds()
            if with_slurm:
                self._start_slurm()
            self._then = {host: self._things(host) for host in ADDRESSES}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._first:
            process.communicate()  # its stdin ends: so does it, when all on that host have
        for process in self._others:
            with process:
                process.kill()
        shutil.rmtree(self.folder)

    def command(self, host: str, *argv: str, **env: str) -> list[str]:
        """What runs a command on a host, in the home."""
        if host == "switch":
            return ["nsenter", "--net", f"--target={self.pids[host]}", "--", *argv]
        enter = f"nsenter --mount --uts --ipc --net --pid --target={self.pids[host]} -- env -i"
        variables = [*_VARIABLES.split(), *(f"{name}={value}" for name, value in env.items())]
        return [*enter.split(), f"--chdir={HOME}", *variables, *argv]

    def run(self, host: str, *argv: str, check: bool = True) -> str:
        """Run a command on a host, or in the network of the switch; what it prints."""
        command = self.command(host, *argv)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, f"{host}: {argv}: {done.stderr or done.stdout}"
        return done.stdout

    def popen(self, host: str, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a program that stays; what it says is in `log`. A signal does not reach it here."""
        with self.log(host, argv[0]).open("ab") as log:
            process = subprocess.Popen(
                self.command(host, *argv, **options.pop("env", {})),
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **options},
                start_new_session=True,
            )
        self._others.append(process)
        return process

    def log(self, host: str, program: str) -> Path:
        """Has what a program said that stays."""
        return self.folder / f"{host}-{Path(program).name}.log"

    def path(self, host: str, path: str | Path) -> Path:
        """A host's file, to read and to write."""
        return Path(f"/proc/{self.pids[host]}/root{path}")

    def write(self, host: str, path: Path, text: str) -> None:
        file = self.path(host, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.write_text(text)

    def processes(self, host: str) -> dict[int, str]:
        """The processes of a host, pid -> command line; what has ended is not counted."""
        found = {}
        for one in self.path(host, "/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = (one / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found |= {int(one.name): words} if words else {}
        return found

    def parent(self, host: str, pid: int) -> int:
        return int(self.run(host, "ps", "-o", "ppid=", "-p", str(pid)))

    def left(self, *hosts: str) -> dict[str, set[str]]:
        """The processes and temporary files that are new on these hosts, or all."""
        now = {host: self._things(host) - self._then[host] for host in hosts or ADDRESSES}
        return {host: things for host, things in now.items() if things}

    def empty(self, *hosts: str) -> None:
        """Fail unless soon nothing is left."""
        with contextlib.suppress(AssertionError):
            until(lambda: not self.left(*hosts), 3.0)
        assert not self.left(*hosts)

    def _things(self, host: str) -> set[str]:
        folders = ("/tmp", "/dev/shm", "/run/lock")
        files = {str(one) for folder in folders for one in self.path(host, folder).glob("*")}
        files |= {str(one) for one in self.path(host, HOME).glob(".gpupool-*")}
        return files | {f"{pid} {words[:60]}" for pid, words in self.processes(host).items()}

    def cable(self, host: str, state: str) -> None:
        """Pull it out ("down") or plug it in ("up"): nobody is told."""
        self.run("switch", "ip", "link", "set", f"p-{host}", state)

    def num_bytes(self, host: str) -> tuple[int, int]:
        """The bytes that have gone to a host, and come from it."""
        (port,) = json.loads(self.run("switch", *f"ip -json -stats link show p-{host}".split()))
        return port["stats64"]["tx"]["bytes"], port["stats64"]["rx"]["bytes"]

    def _start(self, name: str, unshare: str, lines: Sequence[str]) -> None:
        """Start the first process of new namespaces, which runs these lines, and then reaps."""
        script = "\n".join(["set -eu", *lines, "echo up", "trap '' CHLD", "exec cat"])
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [*unshare.split(), "bash", "-c", script]
        process = subprocess.Popen(command, start_new_session=True, **ends)
        self._first.append(process)
        if process.stdout.readline() != b"up\n":
            pytest.skip(f"needs namespaces: {process.stderr.read().decode().strip()}")
        below = psutil.Process(process.pid).children()
        self.pids[name] = below[0].pid if below else process.pid

    def _start_host(self, host: str, shares_home: bool) -> None:
        names = {address: name for name, address in ADDRESSES.items() if name != host}
        names |= {"127.0.0.1": "localhost", "127.0.1.1": host}
        lines = [*_own_files(self.folder, shares_home), f"hostname {host}", _OF_A_HOST]
        lines += [f"echo {address} {name} >> {OWN}/hosts" for address, name in names.items()]
        lines += [f"mount -n --bind {OWN}/hosts /etc/hosts"]
        self._start(host, _SPACES, lines)
        cable = f"ip link add p-{host} master br0 up type veth peer eth0 netns {self.pids[host]}"
        self.run("switch", *cable.split())
        plug_in = f"ip addr add {ADDRESSES[host]}/24 dev eth0; ip link set eth0 up"
        self.run(host, "sh", "-c", plug_in)

    def _start_sshds(self) -> None:
        """Start an sshd on each node; the user of `login` has the key, and knows the nodes'."""
        for name in ("key", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name]
            subprocess.run(make, check=True)
        keys = {one.name: one.read_text() for one in self.folder.glob("*key*")}
        for node in NODES:
            for name, text in (keys | {"sshd_config": _SSHD}).items():
                self.write(node, OWN / name, text)
            self.popen(node, "/usr/sbin/sshd", "-D", "-e", "-f", str(OWN / "sshd_config"))
        self.write("login", OWN / "key", keys["key"])
        self.write("login", OWN / "known_hosts", f"{','.join(NODES)} {keys['host_key.pub']}")
        self.write("login", HOME / ".ssh/config", _SSH)
        until(lambda: all(b"listening" in self.log(n, "sshd").read_bytes() for n in NODES), 5.0)
        link = ("ip", "-brief", "link", "show", "eth0")
        until(lambda: all(" UP " in self.run(host, *link) for host in ADDRESSES), 5.0)

    def _start_slurm(self) -> None:
        """Start Slurm: its controller on login, and nodes with two GPUs each that are none."""
        need("slurmctld", "slurmd", "salloc", "munged")
        munged = f"munged --foreground --force --key-file={OWN}/munge.key --seed-file={OWN}/seed"
        for host in ADDRESSES:
            self.write(host, OWN / "munge.key", "not secret " * 10)
            self.write(host, OWN / "slurm.conf", _SLURM)
            self.write(host, OWN / "gres.conf", f"Name=gpu File={OWN}/gpu[0-1]\n")
            self.write(host, OWN / "cgroup.conf", "CgroupPlugin=cgroup/v1\n")  # none is used
            self.popen(host, *munged.split())
        sockets = [self.path(host, "/run/munge/munge.socket.2") for host in ADDRESSES]
        until(lambda: all(socket.exists() for socket in sockets), 5.0)
        self.popen("login", "slurmctld", "-D", "-c")
        for node in NODES:
            self.popen(node, "slurmd", "-D")
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        until(lambda: self.run("login", *idle, check=False) == f"{len(NODES)}\n", 10.0)


def _own_files(folder: Path, shares_home: bool) -> Iterator[str]:
    """Commands that give a host its own files, and leave it what is needed of the machine's."""
    trees = {Path(one) for one in (ROOT, sys.prefix, sys.base_prefix)}
    trees |= {tree.resolve() for tree in trees}
    stage, home = folder / "stage", folder / "home"
    yield f"mkdir -p {stage} {home}"
    for covered in _COVERED:
        shared = f"--bind {home}" if covered == HOME and shares_home else ""
        yield f"mount -n {shared or '-t tmpfs -o mode=755 lab'} {stage}"
        for tree in sorted(tree for tree in trees if tree.is_relative_to(covered)):
            place = shlex.quote(str(stage / tree.relative_to(covered)))
            yield f"mkdir -p {place}; mount -n --rbind {shlex.quote(str(tree))} {place}"
        yield f"mount -n --move {stage} {covered}"
