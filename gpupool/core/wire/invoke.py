"""The one function that travels to the engines. Runs anywhere, called on engines.

ipyparallel sends a function as its code object and runs it in the engine's own copy of the module
it came from. Sending only this stub keeps engine code the engine's installed version, and keeps the
client from importing it: the client names a function of `gpupool/engine/entry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nobody(name: str, payload: dict[str, Any], number: int | None) -> Any:
    raise RuntimeError(f"{name}: this process is no engine, and serves no calls")


serve: Callable[[str, dict[str, Any], int | None], Any] = _nobody
"""Serves a call in this process; `gpupool/engine/entry.py` puts the real one here."""


def invoke(name: str, payload: dict[str, Any], number: int | None = None) -> Any:
    """Call `gpupool.engine.entry.<name>(**payload)` on this engine; returns its plain value.

    `number` is by what an interrupt knows the call; without one it cannot be interrupted.
    """
    return serve(name, payload, number)
