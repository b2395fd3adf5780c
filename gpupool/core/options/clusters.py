"""How the hosts of a pool are found and reached: presets, `gpupool.toml`, and what is wrong there.

Runs on the client. Nothing here starts anything: `pool/launchers/allocation.py` does.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import choose, suggest
from gpupool.core.options.pool_options import PROFILES, PoolOptions
from gpupool.core.terminal import plain
from gpupool.core.wire import environ

FILE = "gpupool.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Three command lines, and what the hosts need: see docs/guides/clusters.md.

    Command lines are split as a shell would, and no shell runs them; `{host}`, `{ranks}` (of that
    host, if known) and `{job}` stand in them.
    """

    name: str
    """As it was asked for: "slurm", or the name of a table in gpupool.toml."""
    n: int | None = None
    """Number of ranks, if it was said here or there."""
    hold: str = ""
    """Gets the hosts, and keeps them until its stdin closes. When it has them it prints one line:
    "gpupool JOB HOST[:RANKS] HOST[:RANKS] ...", with "-" where no job is."""
    hosts: tuple[str, ...] = ()
    """HOST or HOST:RANKS, where no `hold` says them."""
    run: str = ""
    """Runs on `{host}`, with its stdin and stdout here, the one word of a shell put behind it."""
    is_private: bool = False
    """Whether nobody on the network can read what crosses the line of `run`: keys may."""
    state: str = ""
    """Prints how the job stands: "STATE|reason|expected start|end" (ISO times)."""
    cancel: str = ""
    """Ends the job, should its `hold` not have."""
    down: str = ""
    """What `%gpupool stop --down` runs."""
    python: str = ""
    """The Python of the hosts; empty: this notebook's."""
    network: str = ""
    """The network that the hosts share, as "10.1.0.0/16"; empty: what all can reach."""


_MORE = ("via", "words", "queue", "image")  # what a table may say beyond the fields of a cluster
_KINDS: dict[str, Any] = {"hosts": list | str | int, "words": list, "is_private": bool, "n": int}
_HOST = re.compile(r"(?!-)([\w.@%-]+)(?::([1-9]\d{0,3}))?")


def cluster_of(options: PoolOptions) -> Cluster | None:
    """What `options.profile` means, None for this machine; an OptionsError if it means nothing."""
    name = options.profile
    if name == "local":
        return None
    file, tables = _own_tables()
    if name not in (*tables, *PROFILES):
        where = f"in {file}" if file else f"and no {FILE}"
        hint = suggest(name, [*PROFILES, *tables])
        raise OptionsError(f"there is no cluster {name!r} {where}. {hint}")
    try:
        return _cluster(name, _checked(tables.get(name, {})), options)
    except ValueError as error:
        where = f"{file}, [{name}]" if name in tables else name
        raise OptionsError(f"{where}: {error}") from None


def hosts_of(words: Iterable[str]) -> list[tuple[str, int | None]]:
    """The hosts of HOST[:RANKS] ..., with the ranks of each; of Slurm's "4(x2),2" before them too.
    An OptionsError if one is no name of a host, or comes twice.

    >>> hosts_of(["a", "b:2"]), hosts_of(["4(x2),2", "a", "b", "c"])
    ([('a', None), ('b', 2)], [('a', 4), ('b', 4), ('c', 2)])
    """
    words = list(words)
    if not words:
        raise OptionsError("no hosts are named: write HOST or HOST:RANKS, as --hosts gpu1,gpu2:4.")
    first, *others = words
    if others and re.fullmatch(r"[\d(),x]+", first):
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", first)
        each = [count for count, times in counts for _ in range(int(times or 1))]
        words = [f"{name}:{count}" for name, count in zip(others, each, strict=False)]
    hosts: dict[str, int | None] = {}
    for word in words:
        found = _HOST.fullmatch(word)
        if not found or found[1] in hosts:
            wrong = "is named twice" if found else "is no host"
            raise OptionsError(f"{plain(word)!r} {wrong}: write HOST or HOST:RANKS, as gpu1:4.")
        hosts[found[1]] = int(found[2]) if found[2] else None
    return list(hosts.items())


def _cluster(name: str, table: dict[str, Any], options: PoolOptions) -> Cluster:
    presets = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    via = table.get("via") or (name if name in presets else "own")
    choose("via", via, tuple(presets))
    made = presets[via] | {key: value for key, value in table.items() if key not in _MORE}
    n, hosts = options.n or table.get("n"), options.hosts or made.pop("hosts", ())
    words = (*map(str, table.get("words", ())), *options.words)
    if words and "{words}" not in made.get("hold", ""):
        raise OptionsError(f"words={words}: {via} asks no scheduler for hosts.")
    # What srun would take for options is of the notebook's own step.
    own = [key for key in os.environ if re.match("SLURM_(?!CONF$)|SRUN_", key)]
    clean = shlex.join(["env", *(f"-u{key}" for key in own)]) if own else ""
    values = {"n": str(n or ""), "words": shlex.join(words), "clean": clean}
    values |= dict.fromkeys(("asked", "tasks", "gpus"), "")
    if via in ("kubernetes", "sky"):
        values |= _counted(name, via, n, hosts, table, options.device)
    elif not hosts and "hold" not in table and "SLURM_JOB_ID" in os.environ:
        hosts, made["cancel"] = "scontrol show hostnames", ""
    elif hosts and "hold" in made:
        raise OptionsError(f"hosts={hosts!r}: it gets its hosts itself, leave them out.")
    elif via == "slurm" and n:
        of_gpus = any(word.startswith(("-G", "--gpu", "--gres", "--tres")) for word in words)
        each = "" if options.device == "cpu" or of_gpus else "--gpus-per-task=1"
        values |= {"asked": f"-n {n} {each}", "tasks": "$SLURM_TASKS_PER_NODE"}
        if "--gpus-per-task=1" in (each, *words):  # our own step, of one task, would have one
            values["gpus"] = "--gpus={ranks}"
    if isinstance(hosts, str):
        listing = f"hosts=$({hosts}) && echo gpupool ${{SLURM_JOB_ID:--}} $hosts && exec cat"
        made["hold"] = f"sh -c {shlex.quote(listing)}"
    elif "hold" not in made:
        made["hosts"] = tuple(map(str, hosts))
        if any(count for _, count in hosts_of(made["hosts"])) and n:
            raise OptionsError(f"n={n} and hosts with their ranks exclude each other.")
    for key in ("hold", "run", "state", "cancel", "down"):
        made[key] = _filled(made.get(key, ""), values).strip()
        shlex.split(made[key])  # raises ValueError for half a quotation
    if not made["run"]:
        raise OptionsError("it has no `run`, the command that runs another one on {host}.")
    return Cluster(**{**made, "name": name, "n": n})


def _counted(
    name: str, via: str, n: int | None, hosts: object, table: Mapping[str, Any], device: str
) -> dict[str, str]:
    """What is asked for where one says how many hosts, not which."""
    number = "".join(hosts) if isinstance(hosts, tuple) else str(hosts)
    if not re.fullmatch(r"[1-9]\d*", number := number or "1"):
        raise OptionsError(f"hosts={plain(number)!r}: must be the number of hosts, as 2.")
    if via == "sky":
        return {"id": re.sub("[^a-z0-9]+", "-", f"gpupool-{name}".lower()), "number": number}
    if not n or n % int(number):
        raise OptionsError(f"say how many ranks: -n 8, or another number that {number} divides.")
    if "image" not in table:
        raise OptionsError(f"{FILE} has to name an image that has gpupool: image = '...'.")
    values = {"id": f"gpupool-{secrets.token_hex(4)}", "number": number}
    values |= {key: json.dumps(table.get(key, "")) for key in ("image", "queue")}  # JSON is YAML
    values["gpus"] = str(0 if device == "cpu" else n // int(number))
    template = Path(__file__).with_name("kubernetes.yaml").read_text()
    return {**values, "manifest": shlex.quote(_filled(template, values))}


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def _checked(table: dict[str, Any]) -> dict[str, Any]:
    """A table in which every key is known, and its value of its kind: a text unless said."""
    known = [*(one.name for one in fields(Cluster) if one.name != "name"), *_MORE]
    for key, value in table.items():
        name = "" if key in known else key  # `is_private` sounds like a secret
        if not environ.inheritable({name: str(value)}):
            raise OptionsError(f"{plain(key)} has a secret: `%gpupool env NAME` sends these.")
        if key not in known:
            raise OptionsError(f"{key!r} is not an option of a cluster. {suggest(key, known)}")
        if not isinstance(value, _KINDS.get(key, str)):
            raise OptionsError(f"{key}={plain(repr(value))} is of the wrong kind.")
    ipaddress.IPv4Network(table.get("network", "0.0.0.0/0"), strict=False)  # raises ValueError
    return table


def _own_tables() -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The file that counts here, and what it says: name -> table."""
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    file = next(filter(Path.exists, (Path(FILE), Path(settings, "gpupool", FILE))), None)
    if file is None:
        return None, {}
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())  # what is open now, also behind a link
            if found.st_uid not in (os.getuid(), 0) or found.st_mode & (S_IWGRP | S_IWOTH):
                raise OptionsError(f"others can write {file}, which runs: `chmod go-w {file}`.")
            tables = tomllib.load(opened)
    except (OSError, ValueError) as error:
        raise OptionsError(f"{file} cannot be read: {plain(str(error))}.") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise OptionsError(f"{file}: {plain(name)} is in no table: [NAME] goes before it.")
    return file, tables
