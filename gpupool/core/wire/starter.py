"""What client and starter send each other. Runs anywhere; the standard library only.

Each is one line of JSON: {"kind": "spawned", "name": "rank 0", "pid": 4711}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

STARTER, CONTROLLER = "starter", "controller"
CONNECTION_FILE = "ipcontroller-engine.json"  # in the pool's folder of another host
_RANK = "rank "  # with its number behind it


def process_of(rank: int) -> str:
    return f"{_RANK}{rank}"


def log_of(process: str) -> str:
    """The name of its log, in the pool's folder."""
    return f"{process.replace(' ', '')}.log"


def rank_of(process: str) -> int | None:
    return int(process.removeprefix(_RANK)) if process.startswith(_RANK) else None


# ---- from the client to the starter ----------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """A pool begins; `env` is the environment of all its processes, and never holds a secret.

    Its private folder is inside the starter's; on another host ("") the starter makes it, with the
    connection file: its text is `connection`, or, where others could read what crosses, in the file
    `connection_path` of a home that both hosts see. `env` is the starter's own then. The folder
    `before` was left there by a starter of this pool that was killed.
    """

    folder: str
    env: Mapping[str, str]
    connection: str = ""
    connection_path: str = ""
    before: str = ""


@dataclass(frozen=True)
class Reach:
    """Try to connect to where hosts listen, as their `Hello`s say; answered by `Reached`."""

    targets: Mapping[str, Sequence[tuple[str, str, int]]]


@dataclass(frozen=True)
class Ping:
    """Answered by `Ping`. Who hears nothing for long takes the other for lost."""


@dataclass(frozen=True)
class Lock:
    """Lock `number` of these devices until the pool ends; answered by `Locked`."""

    devices: Sequence[str]
    number: int
    force: bool


@dataclass(frozen=True)
class Spawn:
    """Start a process, with `env` beside that of the pool, and `defaults` for what that lacks."""

    name: str
    target: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: str
    defaults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """Kill the processes of these names, with all they have forked, also those still to come;
    answered by `Killed`."""

    names: Sequence[str]


@dataclass(frozen=True)
class Stop:
    """The pool ends; answered by `Stopped`."""


# ---- from the starter to the client ----------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """What a starter on another host is: said first, and once.

    `versions` are those of Python, gpupool and torch, `gpus` a `Discovery` as a dict, `num_cores`
    those that the job may use. It listens, until a pool is opened, at [interface, address, port].
    """

    versions: Mapping[str, str]
    gpus: Mapping[str, Any]
    num_cores: int
    listens_at: Sequence[tuple[str, str, int]]


@dataclass(frozen=True)
class Opened:
    """The pool's private folder on that host is there; or "", and `why` it is not."""

    folder: str
    why: str = ""


@dataclass(frozen=True)
class Reached:
    """What could not be reached: name of a host -> address -> why; the others could."""

    failed: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Ready:
    """All is imported that a process needs; said once."""


@dataclass(frozen=True)
class Locked:
    """The devices that are locked now, and those that are not, with their owners in words."""

    devices: Sequence[str]
    others: Mapping[str, str]


@dataclass(frozen=True)
class Spawned:
    name: str
    pid: int


@dataclass(frozen=True)
class Killed:
    """Of the names of a `Kill` none is still to come; ends are reported after it."""


@dataclass(frozen=True)
class Exited:
    """A process has ended, or could not be started; of the starter itself the client says so."""

    name: str
    status: int
    cause: str
    log_tail: str


@dataclass(frozen=True)
class Stopped:
    """Nothing of the pool is left."""


Line = (
    Open | Lock | Spawn | Kill | Stop | Reach | Ping
    | Hello | Ready | Opened | Reached | Locked | Spawned | Killed | Exited | Stopped
)  # fmt: skip
_KINDS: dict[str, type[Line]] = {kind.__name__.lower(): kind for kind in get_args(Line)}


def encode(line: Line) -> bytes:
    return json.dumps({"kind": type(line).__name__.lower(), **vars(line)}).encode() + b"\n"


def decode(line: bytes) -> Line | None:
    """A line that has come; None if it is none: what a `sitecustomize` prints goes the same way."""
    try:
        fields: dict[str, Any] = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
