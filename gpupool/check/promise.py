"""A promise that is checked, and what came of it. Runs on the client.

A check is a function of the bench, below `@check(limit_s=30.0)`. Its docstring is the promise in
the user's words, and its name is what `--only` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Verdict = Literal["ok", "FAIL", "skip", "note"]
_Bench = TypeVar("_Bench")


class NotKeptError(Exception):
    """A promise that is not kept; its text says what was found instead."""


class NotTriedError(Exception):
    """A promise that cannot be tried here; its text says why."""


class Found:
    """What was found of a promise that is kept: words, and figures by name.

    `is_note`: a person should look at it, though nothing that was promised is broken.
    """

    def __init__(self, text: str = "", *, is_note: bool = False, **figures: float) -> None:
        self.text, self.is_note, self.figures = text, is_note, figures


@dataclass(frozen=True, slots=True)
class Check(Generic[_Bench]):
    """One check: `run` is given the bench it works at, and has `limit_s` seconds."""

    name: str
    promise: str
    run: Callable[[_Bench], Found]
    limit_s: float


def check(limit_s: float) -> Callable[[Callable[[_Bench], Found]], Check[_Bench]]:
    """Make a check of a function, whose name and docstring are those of the line."""

    def made(run: Callable[[_Bench], Found]) -> Check[_Bench]:
        name = run.__name__.replace("_", "-")
        return Check(name, (run.__doc__ or "").strip(), run, limit_s)

    return made


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report: what was promised, and what was found in how many seconds."""

    name: str
    promise: str
    verdict: Verdict
    text: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        end = f": {self.text}" if self.text else ""
        return f"{self.verdict:>4}  {self.name}: {self.promise} ({self.seconds:.1f} s){end}"
