"""What a client asks of ranks over the control channel, also of busy ones. Runs anywhere.

A request crosses as a message of ipykernel: `message_type` and `content` of it. A rank answers with
a dict: "status" is "ok", or "error" with the error's text; `gpupool/engine/control.py` says what
else stands in it. The client itself puts "died" where a rank ends before it has answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """One request. A rank does it in its control thread, while its main thread goes on."""

    @classmethod
    def message_type(cls) -> str:
        """The type of the message, which ipykernel finds the handler by."""
        return f"gpupool_{cls.__name__.lower()}_request"

    def content(self) -> dict[str, Any]:
        """The fields, as the message has them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class Stop(ControlRequest):
    """End the training of this name, or a loop (""), after its step; `at_once`: where it is."""

    name: str = ""
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Interrupt(ControlRequest):
    """Raise KeyboardInterrupt in the call of this number; None: in the one that runs."""

    number: int | None = None


@dataclass(frozen=True, slots=True)
class Abort(ControlRequest):
    """Leave the collective; with a number, interrupt that call as well."""

    number: int | None = None


@dataclass(frozen=True, slots=True)
class Where(ControlRequest):
    """Say the line and the collective that the main thread is in: "where" of the answer.

    `history` adds what is over; a `glance` costs less, see `gpupool/engine/group/whereabouts.py`.
    """

    history: bool = False
    glance: bool = False


@dataclass(frozen=True, slots=True)
class Counts(ControlRequest):
    """Say how many collectives each group has had: "counts" of the answer."""


@dataclass(frozen=True, slots=True)
class SetEnvironment(ControlRequest):
    """Set and remove environment variables; `refresh`: open file systems take new credentials.

    Its repr has no values: they may be secrets.
    """

    variables: Mapping[str, str] = field(repr=False)
    unset: Sequence[str]
    refresh: bool = True
