"""What client and starter send each other. Runs anywhere; the standard library only.

Each is one line of JSON: {"kind": "spawned", "name": "rank 0", "pid": 4711}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

STARTER, CONTROLLER = "starter", "controller"
_RANK = "rank "  # with its number behind it


def process_of(rank: int) -> str:
    """The name of a rank's process."""
    return f"{_RANK}{rank}"


def rank_of(process: str) -> int | None:
    """The rank of a process of this name; None if it is of none."""
    return int(process.removeprefix(_RANK)) if process.startswith(_RANK) else None


# ---- from the client to the starter ----------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """A pool begins; its private folder, inside the starter's, is there.

    `env` is the environment of all its processes. It never holds a secret. Without a folder, on
    another host than the notebook's, the starter makes one, and `env` adds to its own environment;
    `files` (name -> text) are put there. Answered by `Opened`.
    """

    folder: str
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Listen:
    """Listen, for a moment, at each address that other hosts may reach; answered by `Listening`.

    `network` (as "10.1.0.0/16") leaves out those that are not in it.
    """

    network: str = ""


@dataclass(frozen=True)
class Reach:
    """Try to connect to these addresses of other hosts; answered by `Reached`.

    `targets`: name of a host -> [address, port] of what it listens at.
    """

    targets: Mapping[str, Sequence[tuple[str, int]]]


@dataclass(frozen=True)
class Ping:
    """Both ends are there; answered by `Ping`. Who hears nothing for long takes the other for
    lost."""


@dataclass(frozen=True)
class Log:
    """Send the end of a process's log; answered by `LogTail`."""

    name: str


@dataclass(frozen=True)
class Lock:
    """Lock `number` of these devices until the pool ends; answered by `Locked`."""

    devices: Sequence[str]
    number: int
    force: bool


@dataclass(frozen=True)
class Spawn:
    """Start a process, with `env` beside that of the pool."""

    name: str
    target: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: str


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

    `versions` are those of Python, gpupool and torch ("": it is not there). `gpus` are the GPUs
    as `Discovery` has them (`dataclasses.asdict`), `num_cores` those that the job may use, `note`
    says what may go wrong there.
    """

    host: str
    versions: Mapping[str, str]
    gpus: Mapping[str, Any]
    num_cores: int
    note: str


@dataclass(frozen=True)
class Opened:
    """The pool's private folder on that host is there."""

    folder: str


@dataclass(frozen=True)
class Listening:
    """Where a host listens: [interface, address, port]."""

    at: Sequence[tuple[str, str, int]]


@dataclass(frozen=True)
class Reached:
    """What could not be reached: name of a host -> address -> why; the others could."""

    failed: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class LogTail:
    """The end of a log."""

    name: str
    text: str


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
    """A process is there."""

    name: str
    pid: int


@dataclass(frozen=True)
class Killed:
    """Of the names of a `Kill` none is still to come; ends are reported after it."""


@dataclass(frozen=True)
class Exited:
    """A process has ended, or could not be started.

    `cause` is what is known beside its exit status. Of the starter itself the client says so.
    """

    name: str
    status: int
    cause: str
    log_tail: str


@dataclass(frozen=True)
class Stopped:
    """Nothing of the pool is left."""


Line = (
    Open | Lock | Spawn | Kill | Stop | Listen | Reach | Ping | Log
    | Hello | Ready | Opened | Listening | Reached | Locked | Spawned | Killed | Exited | LogTail | Stopped
)  # fmt: skip
_KINDS: dict[str, type[Line]] = {kind.__name__.lower(): kind for kind in get_args(Line)}


def encode(line: Line) -> bytes:
    """A line as it crosses: its kind and its fields."""
    return json.dumps({"kind": type(line).__name__.lower(), **vars(line)}).encode() + b"\n"


def decode(line: bytes) -> Line | None:
    """A line that has come; None if it is none: what a `sitecustomize` prints goes the same way."""
    try:
        fields: dict[str, Any] = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
