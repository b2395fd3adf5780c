"""How a call is served: by an engine, or by the notebook's own process. Runs anywhere.

`invoke` is the one function that travels to the engines.

ipyparallel sends a function as its code object and runs it in the engine's own copy of the module
it came from. Sending only this stub keeps engine code the engine's installed version, and keeps the
client from importing it: the client says by its type which function of `gpupool/engine/entry.py`
it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpupool.core.machine.topology import Rank
from gpupool.core.wire.calls import Call
from gpupool.core.wire.output import OnMessage
from gpupool.core.wire.replies import Reply, Value, apart
from gpupool.core.wire.requests import Answer, ControlRequest, Found


class OwnRank(Protocol):
    """The notebook's process as rank 0 of 1. Described at `gpupool/engine/inline.py`."""

    def join(self, rank: Rank, folder: Path) -> tuple[Rank, Sequence[str]]: ...
    def call(self, call: Call[Value], hear: OnMessage | None) -> Reply[Value]: ...
    def set(self, name: str, value: object) -> None: ...
    def control(self, request: ControlRequest[Found]) -> Answer[Found]: ...
    def leave(self) -> None: ...


def _nobody(call: Call[Any]) -> Reply[Any]:
    raise RuntimeError(f"{type(call).__name__}: this process is no engine, and serves no calls")


serve: Callable[[Call[Any]], Reply[Any]] = _nobody
"""Serves a call in this process; `gpupool/engine/entry.py` puts the real one here."""

own_rank: OwnRank | None = None
"""This process as a rank; put here likewise."""


def invoke(call: Call[Any]) -> tuple[Reply[Any], bytes | None]:
    """Serve a call on this engine: the reply, as `together` takes it."""
    return apart(serve(call))
