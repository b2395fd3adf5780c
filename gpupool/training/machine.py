"""What the machines of a pool give, before anything is trained: a table. Runs on the client."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpupool.core.errors import OptionsError, PoolError
from gpupool.core.formatting import Table, number, rank_count
from gpupool.core.machine.gpus import use_of
from gpupool.core.progress import progress
from gpupool.core.urls import without_passwords
from gpupool.pool.pool import Pool
from gpupool.pool.session import gpus

# Of `nvidia-smi topo -m`, the nearest first: its legend says the same.
_LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through the CPU",
    "SYS": "PCIe, and between the sockets of the CPUs",
}
Row = tuple[str, str, str]  # what, what was found, and what to do, "" where that is nothing


def examine(pool: Pool, url: str = "") -> Table:
    """Look at the GPUs and who else uses them, cores, shared memory, and how fast ranks exchange
    gradients; with `url` of a folder also how fast they read, with the pool's keys.

    Raises SpmdError if a rank fails, as where it cannot read.
    """
    shown = without_passwords(url)
    if shown != url:  # it would stand in a rank's traceback
        raise OptionsError(f"{shown} has a password or signature in it: send keys by %gpupool env.")
    if pool.status().state == "busy":
        raise PoolError(
            "the pool is busy, so nothing can be measured: wait until it is idle. `run.doctor()` "
            "says why a training is slow that still runs."
        )
    with progress("Looking at the machine"):
        facts = dict(_on_ranks(pool, "facts()"))
        rows = [*_gpus(pool), *_links(facts.values()), _cores(pool, facts), _memory(facts)]
        if len(pool.training_ranks) > 1:
            rate = min(_on_ranks(pool, "exchange_rate()", pool.training_ranks).values())
            rows.append(_exchange(pool, rate))
        if url:
            found = _on_ranks(pool, f"store_rate({url!r})", pool.training_ranks)
            rows.append(_store(url, list(found.values())))
    return Table("The machine", ("what", "found", "what to do"), tuple(rows))


def _on_ranks(pool: Pool, asked: str, ranks: Sequence[int] | None = None) -> Any:
    source = f"__import__('gpupool.engine.probe.rates', fromlist=['rates']).{asked}"
    return pool.run(source, ranks=ranks)


def _gpus(pool: Pool) -> list[Row]:
    names = Counter(rank.gpu.name for rank in pool.ranks if rank.gpu)
    if not names:
        why = pool.status().why_cpu
        return [("GPUs", f"none{': ' * bool(why)}{why}; {rank_count(pool.world_size)} on CPUs", "")]
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    advice = "" if len(names) == 1 else "the slowest sets the pace: start with --gpus of one kind"
    own = {rank.gpu.uuid for rank in pool.ranks if rank.gpu}
    others = {gpu.label: said for gpu in gpus() if gpu.uuid in own and (said := use_of(gpu, True))}
    used = [
        ("others", f"GPU {label} is {used}", "choose others: --gpus")
        for label, used in others.items()
    ]
    return [("GPUs", found, advice), *used]


def _links(facts: Any) -> list[Row]:
    found = dict.fromkeys(links_of(one["links"]) for one in facts)
    return [("links", words, "") for words in found if words]


def links_of(matrix: str) -> str:
    """How the GPUs are joined, of what `nvidia-smi topo -m` prints; "" of a single one.

    >>> links_of("     GPU0 GPU1 CPU Affinity\\nGPU0 X NV18 0-15\\nGPU1 NV18 X 0-15")
    'NVLink (18 links a pair)'
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines()]
    num = sum(bool(re.fullmatch(r"GPU\d+", row[0])) and "X" in row for row in rows if row)
    kinds = {kind for row in rows if row and row[0].startswith("GPU") for kind in row[1 : num + 1]}
    found = [f"NVLink ({kind[2:]} links a pair)" for kind in sorted(kinds) if kind[:2] == "NV"]
    found += [words for kind, words in _LINKS.items() if kind in kinds]
    return ", ".join(dict.fromkeys(found))


def _cores(pool: Pool, facts: Any) -> Row:
    hosts: dict[str, list[int]] = {}
    for rank in pool.ranks:
        hosts.setdefault(rank.host, []).append(rank.rank)
    found, advice = [], ""
    for host, ranks in hosts.items():
        cores, threads = facts[ranks[0]]["cores"], sum(facts[rank]["threads"] for rank in ranks)
        found.append(
            f"{host + ': ' if host else ''}{cores} for {rank_count(len(ranks))}, {threads} threads"
        )
        if len(ranks) > cores or threads > cores:
            advice = "ranks wait for each other's cores: start fewer, or torch.set_num_threads"
    return ("cores", "; ".join(found), advice)


def _memory(facts: Any) -> Row:
    said = next((one["shared_memory"] for one in facts.values() if one["shared_memory"]), "")
    found, _, advice = said.partition(": ")
    return ("shared memory", found or "at least 1 GiB", advice)


def _exchange(pool: Pool, rate: float) -> Row:
    """Twice the bytes of 100 million parameters pass a rank in a step, less what is hidden."""
    seconds = 2 * 4e8 / rate
    found = f"{rate / 1e9:.3g} GB/s on the bus ({pool.status().training_backend})"
    return ("all-reduce", f"{found}: about {seconds:.2g} s a step for 100 million parameters", "")


def _store(url: str, found: Sequence[tuple[int, int, float]]) -> Row:
    files, num_bytes = sum(one[0] for one in found), sum(one[1] for one in found)
    seconds = max(one[2] for one in found)
    if not files:
        return (url, "holds no files", "name a folder that has some")
    rate = f"{num_bytes / seconds / 1e6:.3g} MB/s, {number(files / seconds)} files/s"
    return (url, f"{rate} by {rank_count(len(found))} at once", "")
