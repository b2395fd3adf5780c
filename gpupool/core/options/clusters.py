"""How the hosts of a pool are found and reached: presets, `gpupool.toml`, and what is wrong there.

Runs on the client. Nothing here starts anything: `pool/launchers/allocation.py` does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.pool_options import PROFILES, PoolOptions, refuse_unknown, suggest
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
    via: str
    """The preset it is made from: ssh, slurm, mpi, kubernetes, sky, or own."""
    n: int | None = None
    """Number of ranks, if it was said here or there."""
    hold: str = ""
    """Gets the hosts, and keeps them until its stdin closes. When it has them it prints one line:
    "gpupool JOB HOST[:RANKS] HOST[:RANKS] ...", with "-" where no job is. Empty: nothing has to be
    held."""
    hosts: tuple[str, ...] = ()
    """HOST or HOST:RANKS, where no `hold` says them."""
    run: str = ""
    """Runs what is put behind it on `{host}`, with its stdin and stdout here."""
    quotes: bool = False
    """Whether `run` gives the rest to a shell over there, as ssh does."""
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
    ports: str = ""
    """Ports to listen at, as "42000-42040", where a firewall leaves these open."""
    env: tuple[str, ...] = ()
    """Names or globs of variables that the hosts get from here."""


_COUNTED = ("kubernetes", "sky")  # of these one says how many hosts, not which
# What a table may say beyond the fields of a cluster, or not for all of these; each with the `via`
# that it is for.
_ONLY = {
    "hosts": ("ssh", "mpi", "own", *_COUNTED),
    "words": ("slurm", *_COUNTED),
    "queue": ("kubernetes",),
    "image": ("kubernetes",),
}
_KINDS: dict[str, tuple[type, ...]] = {  # the others are texts
    **dict.fromkeys(("words", "env"), (list,)),
    **dict.fromkeys(("quotes", "is_private"), (bool,)),
    "hosts": (list, str, int),
    "n": (int,),
}
_SAID = {str: "a text", list: "a list of texts", int: "a number above 0", bool: "true or false"}
_HOST = re.compile(r"(?!-)([\w.@%-]+)(?::([1-9]\d{0,3}))?")


def cluster_of(options: PoolOptions) -> Cluster | None:
    """What `options.profile` means; None for this machine.

    Raises:
        OptionsError: there is no such cluster, its table is wrong, or options contradict it.
    """
    name = options.profile
    if name == "local":
        return None
    file, tables = _own_tables()
    if name not in (*tables, *PROFILES):
        where = f"{file} has {', '.join(tables) or 'none'}" if file else f"there is no {FILE}"
        hint = suggest(name, [*PROFILES, *tables])
        raise OptionsError(f"there is no cluster {name!r}. {hint} (Here {where}.)")
    try:
        return _cluster(name, _checked(tables.get(name, {})), options)
    except ValueError as error:
        where = f"{file}, [{name}]" if name in tables else name
        raise OptionsError(f"{where}: {error}") from None


def hosts_of(words: Iterable[str]) -> list[tuple[str, int | None]]:
    """The hosts of HOST[:RANKS] ..., with the ranks of each; of Slurm's "4(x2),2" before them too.

    >>> hosts_of(["a", "b:2"]), hosts_of(["4(x2),2", "a", "b", "c"])
    ([('a', None), ('b', 2)], [('a', 4), ('b', 4), ('c', 2)])

    Raises:
        OptionsError: one is no name of a host, or comes twice.
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
    via = table.get("via") or (name if name in PROFILES else "own")
    presets = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    if via not in presets:
        raise OptionsError(f"via={via!r} is unknown. {suggest(via, presets)}")
    n, hosts = options.n or table.get("n"), options.hosts or table.get("hosts", ())
    words = (*table.get("words", ()), *options.words)
    for key, value in {**table, "words": words, "hosts": hosts}.items():
        if value and via not in _ONLY.get(key, presets):
            raise OptionsError(f"{key} says nothing to {via}: it is for {', '.join(_ONLY[key])}.")
    values = {"n": str(n or ""), "words": shlex.join(words), "clean": "", "gpus": ""}
    made = presets[via] | {key: value for key, value in table.items() if key not in _ONLY}
    lists, job = made.pop("inside", {}), "-"
    if not hosts and "hold" not in table:
        for variable in filter(os.environ.get, lists):
            if words:
                raise OptionsError(
                    f"{values['words']} asks for nothing inside a job, whose hosts are taken: "
                    f"leave it out, or unset {variable} for a new job."
                )
            hosts, job, made["cancel"] = lists[variable], "${SLURM_JOB_ID:--}", ""
            # They are of the notebook's own step, and srun would take them for options.
            own = {key for key in os.environ if key.startswith(("SLURM_", "SRUN_"))}
            values["clean"] = shlex.join(["env", *(f"-u{key}" for key in own - {"SLURM_CONF"})])
            break
    if isinstance(hosts, int):
        hosts = [str(hosts)]
    if via in _COUNTED:
        said = "".join(hosts) or "1"
        if not said.isdecimal() or not (number := int(said)):
            raise OptionsError(f"hosts={plain(said)!r}: must be the number of hosts, as 2.")
        if via == "sky":
            values |= _machines(name, number, words, options.device)
        else:
            values |= _pods(n, number, table, options.device)
        values["number"] = said
    elif isinstance(hosts, str):
        listing = f"hosts=$({hosts}) && echo gpupool {job} $hosts && exec cat"
        made["hold"] = f"sh -c {shlex.quote(listing)}"
    elif via == "slurm":
        values |= _tasks(n, words, options.device)
    elif hosts or "hold" not in made:
        if any(count for _, count in hosts_of(hosts)) and n:
            raise OptionsError(f"n={n} and hosts with their ranks exclude each other.")
        made["hosts"] = tuple(hosts)
    for key in ("hold", "run", "state", "cancel", "down"):
        made[key] = _filled(made.get(key, ""), values).strip()
        shlex.split(made[key])  # raises ValueError for half a quotation
    if not made["run"]:
        raise OptionsError("it has no `run`, the command that runs another one on {host}.")
    return Cluster(**{**made, "name": name, "via": via, "n": n, "env": (*table.get("env", ()),)})


def _tasks(n: int | None, words: Sequence[str], device: str) -> dict[str, str]:
    """What salloc is asked for. Without a number of ranks each GPU that a host has gets one."""
    is_counted = any(word.startswith(("-n", "--ntasks")) for word in words)
    if n and is_counted:
        raise OptionsError(f"n={n} and {shlex.join(words)} both say how many ranks.")
    of_gpus = any(word.startswith(("-G", "--gpu", "--gres", "--tres")) for word in words)
    gpus = "" if device == "cpu" or of_gpus else "--gpus-per-task=1"
    if not n and not is_counted:
        return {"asked": "", "tasks": ""}
    # Our own step, of one task, would else have the GPU of one.
    is_each = gpus or "--gpus-per-task=1" in words
    step = {"gpus": "--gpus={ranks}"} if is_each else {}
    return {"asked": f"-n {n} {gpus}" if n else gpus, "tasks": "$SLURM_TASKS_PER_NODE", **step}


def _machines(name: str, number: int, words: Sequence[str], device: str) -> dict[str, str]:
    """What `sky launch` is asked for."""
    if device != "cpu" and not any(word.startswith("--gpus") for word in words):
        raise OptionsError("say which GPUs a host has: `-- --gpus H100:8`.")
    name = re.sub("[^a-z0-9]+", "-", f"gpupool-{name}".lower())
    hosts = [name, name, *(f"{name}-worker{i}" for i in range(1, number))]
    return {"id": name, "hosts": " ".join(hosts)}


def _pods(n: int | None, number: int, table: Mapping[str, Any], device: str) -> dict[str, str]:
    """What is asked for of Kubernetes."""
    if not n or n % number:
        raise OptionsError(f"say how many ranks: -n 8, or another number that {number} divides.")
    if "image" not in table:
        raise OptionsError(f"{FILE} has to name an image that has gpupool: image = '...'.")
    labels = {"kueue.x-k8s.io/queue-name": table["queue"]} if "queue" in table else {}
    limits = {"nvidia.com/gpu": n // number} if device != "cpu" else {}
    texts = {"image": table["image"], "labels": labels, "limits": limits}
    values = {key: json.dumps(text) for key, text in texts.items()}  # JSON is YAML
    name = f"gpupool-{secrets.token_hex(4)}"
    template = Path(__file__).with_name("kubernetes.yaml").read_text()
    manifest = _filled(template, {**values, "id": name, "number": str(number)})
    return {"id": name, "manifest": shlex.quote(manifest)}


def _filled(text: str, values: Mapping[str, str]) -> str:
    if "{n}" in text and not values["n"]:
        raise OptionsError("it asks for {n} ranks: say how many, as -n 8.")
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def _checked(table: dict[str, Any]) -> dict[str, Any]:
    """A table in which every key is known, and its value of its kind."""
    known = [*(one.name for one in fields(Cluster) if one.name != "name"), *_ONLY]
    for key, value in table.items():
        is_value = key == "env" and "=" in str(value)
        if is_value or not environ.inheritable({key: str(value)}):
            raise OptionsError(
                f"{plain(key)} has a secret, which does not belong into a file: set it in the "
                "notebook's environment, and list the name of the variable, as env = ['NAME']."
            )
        refuse_unknown([key], known, of=" of a cluster")
        kinds = _KINDS.get(key, (str,))
        are_texts = not isinstance(value, list) or all(isinstance(one, str) for one in value)
        if type(value) not in kinds or not are_texts or (key == "n" and value < 1):
            raise OptionsError(f"{key} must be {' or '.join(_SAID[kind] for kind in kinds)}.")
    for key, form in (("network", "10.1.0.0/16"), ("ports", "42000-42040")):
        if re.sub(r"\d+", "1", table.get(key, form)) != re.sub(r"\d+", "1", form):
            raise OptionsError(f"{key}={table[key]!r}: must be written as {form!r}.")
    return table


def _own_tables() -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The file that counts here, and what it says: name -> table."""
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    file = next(filter(os.path.lexists, (Path(FILE), Path(settings, "gpupool", FILE))), None)
    if file is None:
        return None, {}
    try:
        # What is open now is looked at, also behind a link; a pipe of that name is not waited for.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
            found = os.fstat(opened.fileno())
            is_mine = stat.S_ISREG(found.st_mode) and found.st_uid in (os.getuid(), 0)
            if not is_mine or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise OptionsError(
                    f"{file} has commands that would run as you, and it is another user's, or "
                    f"others can write it: make it yours alone (`chmod go-w {file}`), or remove it."
                )
            tables = tomllib.load(opened)
    except OSError as error:
        raise OptionsError(f"{file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionsError(f"{file} is no TOML: {plain(str(error))}.") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise OptionsError(f"{file}: {plain(name)} is in no table: [NAME] goes before it.")
    return file, tables
