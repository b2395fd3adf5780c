"""How an engine serves a call. Runs anywhere.

`invoke` is the one function that travels to the engines.

ipyparallel sends a function as its code object and runs it in the engine's own copy of the module
it came from. Sending only this stub keeps engine code the engine's installed version, and keeps the
client from importing it: the type of a call says what `gpupool/engine/entry.py` is to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpupool.core.wire.calls import Call
from gpupool.core.wire.replies import Reply


def _nobody(call: Call[Any]) -> Reply[Any]:
    raise RuntimeError(f"{type(call).__name__}: this process is no engine, and serves no calls")


serve: Callable[[Call[Any]], Reply[Any]] = _nobody
"""Serves a call in this process; `gpupool/engine/entry.py` puts the real one here."""


def invoke(call: Call[Any]) -> Reply[Any]:
    """Serve a call on this engine."""
    return serve(call)
