"""What a client asks of ranks over the control channel, also of busy ones. Runs anywhere.

A request crosses as a message of ipykernel: `message_type` and `content` of it, plain data, as is
its answer. Bytes (`data` of a request, and what is `found`) stand beside the content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar

from gpupool.core.wire.location import Location

Found = TypeVar("Found", covariant=True)


@dataclass(frozen=True)
class Answer(Generic[Found]):
    """What a rank says; the client itself answers "died" for one that ends before it has."""

    status: Literal["ok", "error", "died"]
    found: Found | None = None
    error: str = ""

    def content(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ControlRequest(Generic[Found]):
    """One request. A rank does it in its control thread, while its main thread continues."""

    @classmethod
    def message_type(cls) -> str:
        """The type of the message, which ipykernel finds the handler by."""
        return f"gpupool_{cls.__name__.lower()}_request"

    def content(self) -> dict[str, Any]:
        return asdict(self)

    def answer(self, content: Mapping[str, Any]) -> Answer[Found]:
        found = content.get("found")
        read = None if found is None else self._read(found)
        return Answer(content["status"], read, content.get("error", ""))

    def _read(self, plain: Any) -> Any:
        return plain


@dataclass(frozen=True)
class Waits:
    """How long a rank has waited for a batch, and for the store, and why it still waits."""

    batch_s: float
    store_s: float
    reason: str


@dataclass(frozen=True)
class Stop(ControlRequest[Waits]):
    """End the training of this name, or a loop (""), after its step; `at_once`: where it is."""

    name: str = ""
    at_once: bool = False

    def _read(self, plain: Any) -> Any:
        return Waits(**plain)


@dataclass(frozen=True)
class Interrupt(ControlRequest[None]):
    """Raise KeyboardInterrupt in the call of this number; None: in the one that runs."""

    number: int | None = None


@dataclass(frozen=True)
class Abort(ControlRequest[None]):
    """Leave the collective; with a number, interrupt that call as well."""

    number: int | None = None


@dataclass(frozen=True)
class Where(ControlRequest[Location]):
    """Say the line and the collective that the main thread is in; a `glance` costs less."""

    glance: bool = False

    def _read(self, plain: Any) -> Any:
        return Location.from_dict(plain)


@dataclass(frozen=True)
class Counts(ControlRequest[Mapping[str, int]]):
    """Say how many collectives each group has had."""


@dataclass(frozen=True)
class SetEnvironment(ControlRequest[None]):
    """Set and remove environment variables; `refresh`: open file systems take new credentials."""

    variables: Mapping[str, str] = field(repr=False)  # may be secrets
    unset: Sequence[str]
    refresh: bool = True


@dataclass(frozen=True)
class Signal(ControlRequest[None]):
    """Send the process a signal: ipyparallel's `send_signal`, which its nanny would answer."""

    sig: int | str

    @classmethod
    def message_type(cls) -> str:
        return "signal_request"


@dataclass(frozen=True)
class AppendToFile(ControlRequest[str]):
    """Add to the file of this name in the pool's private folder; says its path."""

    name: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class ReadFile(ControlRequest[bytes]):
    """Read so many bytes of such a file, less at its end, from which a `start` below 0 counts."""

    name: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class RemoveFile(ControlRequest[None]):
    """Remove such a file, if it is there."""

    name: str


REQUESTS: Sequence[type[ControlRequest[Any]]] = ControlRequest.__subclasses__()
