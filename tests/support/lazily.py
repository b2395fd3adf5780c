"""Modules that take seconds to import and that few tests need: every process collects all tests."""

from __future__ import annotations

import importlib
from typing import Any


class Lazily:
    """A module, imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
