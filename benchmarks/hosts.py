"""Two hosts with two CPU ranks each: start, a cell, 200 MB, and what a loss costs.

    python -m benchmarks.hosts [--rounds 3] [--ways ssh slurm ...]

The hosts are namespaces of this machine (tests/hosts/lab.py), so it takes root on Linux, and what
`make hosts` installs. They share its cores: a start on two hosts costs what both do. "Started" is
from the call in a new notebook to torch imported on every rank, process group formed and one
all-reduce done; of ipyparallel's own launchers, to its engines being there, without torch and
group. "Lost" is from kill -9 to the next right all-reduce of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import closing

from tests.hosts.lab import ADDRESSES, HOME, Lab
from tests.hosts.notebook import SUM, Notebook

ON_BOTH = "hosts=('node1:2', 'node2:2')"
GPUPOOL = {
    "one host": "start(n=4)",
    "ssh": f"start('ssh', {ON_BOTH})",
    "slurm": "start('slurm', words=('-n4', '--ntasks-per-node=2'))",
    "mpi": f"start('mpi', {ON_BOTH})",
}
PLAIN = f"""
import logging, sys, tempfile
import ipyparallel
from traitlets.config import Config
config, folder = Config(), tempfile.mkdtemp(dir="{HOME}")  # all hosts have this home
config.SSHEngineSetLauncher.engines = {{"node1": 2, "node2": 2}}
config.SSHEngineSetLauncher.remote_python = sys.executable
cluster = ipyparallel.Cluster(
    n=4, engines=KIND, config=config, profile_dir=folder, work_dir=folder, cluster_id="",
    controller_ip="{ADDRESSES["login"]}", log_level=logging.ERROR,
)
client = cluster.start_and_connect_sync(activate=False)
client.wait_for_engines(4, timeout=120, interactive=False)
"""
WAYS = [*GPUPOOL, "ipyparallel, ssh", "ipyparallel, slurm"]
ARRAY = "import numpy; big = numpy.arange(25_000_000.0)"
COLUMNS = {
    "start": ("started, s", 1),
    "cell": ("trivial cell, ms", 1000),
    "there": ("200 MB to all, s", 1),
    "back": ("200 MB from one, s", 1),
    "rank": ("rank lost, s", 1),
    "agent": ("agent lost, s", 1),
}


def measure(way: str) -> dict[str, float]:
    """One way, in a new lab: key of `COLUMNS` -> seconds."""
    shares_home = way != "ssh"  # which does not need it
    with closing(Lab(with_slurm=shares_home)) as lab, closing(Notebook(lab)) as notebook:
        if way not in GPUPOOL:
            start = f"KIND = {way.split()[-1]!r}\n{PLAIN}"
            found = {"start": seconds(notebook, start)}
            found["cell"] = cell(notebook, "client[:].execute('1', silent=False, block=True)")
            notebook.run(ARRAY)
            found["there"] = seconds(notebook, "client[:].push({'big': big}, block=True)")
            found["back"] = seconds(notebook, "client[2].pull('big', block=True)")
            notebook.run("cluster.stop_cluster_sync()")
            return found
        everybody = f"assert set(pool.run({SUM!r}).values()) == {{4.0}}"
        found = {"start": seconds(notebook, f"{GPUPOOL[way]}\n{everybody}")}
        found["cell"] = cell(notebook, "pool.run('1')")
        notebook.run(ARRAY)
        found["there"] = seconds(notebook, "pool['big'] = big; pool.run('big[-1]')")
        found["back"] = seconds(notebook, "pool.run('mine = big + 1'); pool['mine'][2]")
        if way != "one host":
            for name in ("rank", "agent"):
                pid = notebook.run("pool.status().pids[3]")
                killed = pid if name == "rank" else lab.parent("node2", pid)
                lab.run("node2", "kill", "-9", str(killed))
                retry = RETRY.format(everybody=everybody, pid=pid)
                found[name] = seconds(notebook, retry)
        return found


RETRY = """
while True:
    try:
        {everybody}
        if pool.status().pids.get(3, {pid}) != {pid}:
            break
    except gpupool.GpuPoolError:  # the loss is told to what runs
        pass
"""


def seconds(notebook: Notebook, source: str) -> float:
    """How long a cell takes."""
    clock = "import time; began = time.perf_counter()"
    return float(notebook.run(f"{clock}\n{source}\ntime.perf_counter() - began"))


def cell(notebook: Notebook, source: str, repeats: int = 30) -> float:
    """How long a trivial cell takes, as the median."""
    seconds(notebook, source)
    return statistics.median(seconds(notebook, source) for _ in range(repeats))


def main() -> None:
    """All ways in turn, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in chosen.ways}
    for _ in range(chosen.rounds):
        for way, rows in found.items():
            rows.append(measure(way))
    print("| way | " + " | ".join(title for title, _ in COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for way, rows in found.items():
        cells = [
            f"{scale * statistics.median(row[key] for row in rows):.2f}" if key in rows[0] else "-"
            for key, (_, scale) in COLUMNS.items()
        ]
        print(f"| {way} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
