"""Hosts that are not as they should be: they are named, and nothing is left."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.hosts.lab import ADDRESSES, HOME, NODES, OWN, ROOT, Lab, need
from tests.hosts.notebook import SUM, Notebook

pytestmark = pytest.mark.hosts
START = "start('ssh', hosts=('node1:1', 'node2:1'))"
CLUSTER = '[lab]\nvia = "ssh"\nhosts = ["node1:1", "node2:1"]\npython = "/opt/none/bin/python"\n'
PACKAGES = Path(sysconfig.get_paths()["purelib"]).resolve()
INIT = ROOT / "gpupool/__init__.py"
KEYS = OWN / "key.pub"
# what is done to node2, how it is undone, and what is said beside its name
FAULTS = {
    "cable": ("ip link set eth0 down", "ip link set eth0 up", ""),
    "key": (f"mv {KEYS} {KEYS}.away", f"mv {KEYS}.away {KEYS}", "ermission denied"),
    "firewall": (
        f"ip route add unreachable {ADDRESSES['node1']}",
        f"ip route del unreachable {ADDRESSES['node1']}",
        "node1",
    ),
    "version": (
        f"(cat {INIT}; echo; echo __version__ = \"'0.0.1'\") > {OWN}/init; "
        f"mount -n --bind {OWN}/init {INIT}",
        f"umount -n {INIT}",
        "0.0.1",
    ),
    "torch": (  # as if it had been deleted there
        f"mkdir -p {OWN}/up {OWN}/work; cd {PACKAGES}; for one in torch torch-*; do "
        f"mknod {OWN}/up/$one c 0 0; done; mount -n -t overlay lab {PACKAGES} "
        f"-o lowerdir={PACKAGES},upperdir={OWN}/up,workdir={OWN}/work",
        f"umount -n --lazy {PACKAGES}",
        "torch",
    ),
}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    with closing(Notebook(lab)) as notebook:
        yield notebook


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    """After each test the nodes are as they were."""
    yield
    lab.empty(*NODES)


def refused(notebook: Notebook, start: str = START) -> str:
    answer = notebook.begin(f"{start}; pool.stop()").result()
    return f"{answer.get('error')} {answer.get('text')}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_that_will_not_do_is_named(notebook: Notebook, lab: Lab, fault: str) -> None:
    done, undone, says = FAULTS[fault]
    lab.run("node2", "sh", "-c", done)
    text = refused(notebook)
    lab.run("node2", "sh", "-c", undone)
    assert all(part in text for part in ("PoolStartError", "node2", says))


def test_what_is_not_there_is_named(notebook: Notebook, lab: Lab) -> None:
    assert "node9" in refused(notebook, START.replace("node2", "node9"))
    lab.write("login", HOME / "gpupool.toml", CLUSTER)
    assert "/opt/none/bin/python" in refused(notebook, "start('lab')")
    need("mpiexec")
    # of which others can read the line, so that keys go by the home
    assert "home" in refused(notebook, START.replace("ssh", "mpi"))


def test_a_login_shell_may_print(notebook: Notebook, lab: Lab) -> None:
    lab.write("node1", HOME / ".bashrc", 'echo Welcome; echo \'{"kind": "ready"}\'; echo hm >&2')
    notebook.run("start('ssh', hosts=('node1:2',))")
    assert notebook.spmd(SUM) == {0: 2.0, 1: 2.0}
    notebook.run("pool.stop()")
