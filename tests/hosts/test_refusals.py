"""Hosts that are not as they should be: they are named, and nothing is left."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.hosts.lab import HOME, NODES, OWN, ROOT, Lab
from tests.hosts.notebook import SUM, Notebook
from tests.support.processes import until

pytestmark = pytest.mark.hosts
START = "start('ssh', hosts=('node1:1', 'node2:1'))"
CLUSTER = '[lab]\nvia = "ssh"\nhosts = ["node1:1", "node2:1"]\npython = "/opt/none/bin/python"\n'
INIT = ROOT / "gpupool/__init__.py"
PACKAGES = Path(sysconfig.get_paths()["purelib"]).resolve()
KEYS = OWN / "key.pub"
# the lines that do something to node2, which undo it, and what is said
WITHOUT_KEY = f"mv {KEYS} {KEYS}.away", f"mv {KEYS}.away {KEYS}"
ANOTHER_VERSION = (
    f"(cat {INIT}; echo; echo __version__ = \"'0.0.1'\") > {OWN}/i; mount -n --bind {OWN}/i {INIT}",
    f"umount -n {INIT}",
)
WITHOUT_TORCH = (  # as if it had been deleted there
    f"mkdir -p {OWN}/up {OWN}/work; cd {PACKAGES}; for one in torch torch-*; do "
    f"mknod {OWN}/up/$one c 0 0; done; mount -n -t overlay lab {PACKAGES} "
    f"-o lowerdir={PACKAGES},upperdir={OWN}/up,workdir={OWN}/work",
    f"umount -n --lazy {PACKAGES}",
)


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    """One that is refused again and again."""
    with closing(Notebook(lab)) as notebook:
        yield notebook


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    """After each test the nodes are as they were."""
    yield
    until(lambda: not lab.left(*NODES), 3.0, f"{lab.left(*NODES)}: its end")


@pytest.mark.parametrize(
    ("fault", "says"),
    [(WITHOUT_KEY, "ermission denied"), (ANOTHER_VERSION, "0.0.1"), (WITHOUT_TORCH, "torch")],
    ids=["key", "version", "torch"],
)
def test_a_host_that_will_not_do_is_named(
    notebook: Notebook, lab: Lab, fault: tuple[str, str], says: str
) -> None:
    lab.run("node2", "sh", "-c", fault[0])
    text = notebook.refused(START)
    lab.run("node2", "sh", "-c", fault[1])
    assert all(part in text for part in ("PoolStartError", "node2", says))


def test_a_host_that_does_not_answer_is_named(notebook: Notebook, lab: Lab) -> None:
    lab.cut("node2")
    texts = notebook.refused(START), notebook.refused(START.replace("node2", "node9"))
    lab.heal("node2")
    assert all(part in texts[0] for part in ("PoolStartError", "node2"))
    assert all(part in texts[1] for part in ("PoolStartError", "node9"))


def test_hosts_that_do_not_reach_each_other_are_named(notebook: Notebook, lab: Lab) -> None:
    lab.drop()
    text = notebook.refused(START)
    lab.drop("off")
    assert all(part in text for part in ("PoolStartError", *NODES))


def test_where_there_is_no_python_its_path_is_named(notebook: Notebook, lab: Lab) -> None:
    lab.write("login", HOME / "gpupool.toml", CLUSTER)
    assert "/opt/none/bin/python" in notebook.refused("start('lab')")


def test_a_login_shell_may_print(notebook: Notebook, lab: Lab) -> None:
    lab.write("node1", HOME / ".bashrc", 'echo Welcome; echo \'{"kind": "ready"}\'; echo hm >&2')
    notebook.run(START)
    assert notebook.spmd(SUM) == {0: 2.0, 1: 2.0}
    notebook.run("pool.stop()")
