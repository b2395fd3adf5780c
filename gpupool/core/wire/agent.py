"""What client, agent and fork server send each other. Runs anywhere; the standard library only.

Each is one line of JSON (`json_lines.py`): {"kind": "spawned", "name": "rank 0", "pid": 4711}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from gpupool.core.machine.locks import Owner

AGENT, CLIENT, CONTROLLER, FORK_SERVER = "agent", "client", "controller", "fork server"
RANK = "rank "  # with its number behind it


def process_of(rank: int) -> str:
    """The name of a rank's process."""
    return f"{RANK}{rank}"


def rank_of(process: str) -> int | None:
    """The rank of a process of this name; None if it is of none."""
    return int(process.removeprefix(RANK)) if process.startswith(RANK) else None


# ---- from the client to the agent ------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """A pool begins; its private folder, inside the agent's, is there."""

    folder: str


@dataclass(frozen=True)
class Lock:
    """Lock `number` of these devices until the pool ends; answered by `Locked`."""

    devices: Sequence[str]
    number: int
    force: bool


@dataclass(frozen=True)
class Spawn:
    """Start a process. `env` never holds a secret.

    The agent passes it on to the fork server with a `number`, which the answers have.
    """

    name: str
    target: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: str
    number: int = 0


@dataclass(frozen=True)
class Signal:
    """Send a signal to the process of this name, if it is there."""

    name: str
    number: int


@dataclass(frozen=True)
class Kill:
    """Kill the processes of these names, also those that are still to come."""

    names: Sequence[str]


@dataclass(frozen=True)
class Stop:
    """The pool ends."""


# ---- from the agent to the client ------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The fork server has imported its modules; that says it to the agent first."""


@dataclass(frozen=True)
class Locked:
    """The devices that are locked now, and those that are not, with their owners."""

    devices: Sequence[str]
    others: Mapping[str, Owner]
    error: str = ""


@dataclass(frozen=True)
class Spawned:
    """A process is up."""

    name: str
    pid: int


@dataclass(frozen=True)
class Killed:
    """Answers `Kill`; the ends of the processes are reported after it."""


@dataclass(frozen=True)
class Exited:
    """A process has ended; `cause` is what is known beside its exit status."""

    name: str
    status: int
    cause: str
    log_tail: str


@dataclass(frozen=True)
class Stopped:
    """Nothing of the pool is left."""


# ---- from the fork server to the agent -------------------------------------------------------


@dataclass(frozen=True)
class Forked:
    """Answers `Spawn`: when the process has been forked, and a second time when it is up."""

    number: int
    name: str
    log: str
    pid: int
    is_up: bool


Command = Open | Lock | Spawn | Signal | Kill | Stop
Event = Ready | Locked | Spawned | Killed | Exited | Stopped
Answer = Ready | Forked
COMMANDS: tuple[type[Command], ...] = get_args(Command)
EVENTS: tuple[type[Event], ...] = get_args(Event)
ANSWERS: tuple[type[Answer], ...] = get_args(Answer)
