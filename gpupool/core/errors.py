"""Every error gpupool raises on purpose. Runs anywhere.

    GpuPoolError                  one sentence: what happened, where, what to do
    ├── OptionsError (ValueError) an option is unknown, malformed or without effect
    ├── PlacementError            the devices asked for are not there, or in use
    ├── PoolError                 the pool cannot do this now
    │   ├── NoPoolError           no pool runs in this notebook
    │   ├── PoolStartError        the pool did not come up; nothing was left running
    │   ├── EngineDiedError       an engine process is gone
    │   └── ParcelsLostError      a rank does not have what was sent to it before
    ├── TransferError             a variable cannot be sent to the ranks; none has run
    ├── SpmdError                 a cell or function raised on one or more ranks: .errors[rank]
    ├── DataError                 a datastore cannot be listed or read
    │   ├── DataNotFoundError     nothing there
    │   └── CredentialsError      the store refused the credentials
    └── TrainingError             train() or predict() cannot go on

In IPython these show as their message alone: the user's own line is the cell just above it,
and none of our frames would help. `RankError` is not raised: it is what `SpmdError` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class GpuPoolError(Exception):
    """Base of all errors that gpupool raises on purpose; its text is one complete message."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback (its documented hook for exceptions)."""
        return [f"{type(self).__name__}: {self}"]


class OptionsError(GpuPoolError, ValueError):
    """An option is unknown, malformed, contradicts another one, or would have no effect."""


class PlacementError(GpuPoolError):
    """The devices asked for do not exist, are too few, or are in use by another pool."""


class PoolError(GpuPoolError):
    """The pool cannot do what was asked in its present state."""


class NoPoolError(PoolError):
    """No pool runs in this notebook."""


class PoolStartError(PoolError):
    """The pool did not come up. Whatever had been started is stopped again."""


class EngineDiedError(PoolError):
    """The process of an engine has ended."""


class ParcelsLostError(PoolError):
    """A rank does not have what was sent to it before; the next run sends it again."""


class TransferError(GpuPoolError):
    """Variables of the notebook cannot be sent to the ranks; no rank has run.

    `reasons` maps each name to what is wrong with its value.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        listed = "\n".join(f"  {name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(
            f"no rank has run, because what the cell reads cannot be sent to the ranks:\n{listed}\n"
            "Make it in the cell, so that each rank has its own, or run the cell with --isolate, "
            "which sends nothing."
        )

    def __reduce__(self) -> tuple[type[TransferError], tuple[dict[str, str]]]:
        return type(self), (self.reasons,)


@dataclass(frozen=True, slots=True)
class RankError:
    """What one rank raised, as plain data.

    `traceback` is IPython's formatted text (with ANSI colours), without frames of gpupool.
    `failed_at` is the engine's wall clock in seconds since the epoch. `freed`: it raised only
    because another rank had failed before, in a collective that could not go on.
    """

    rank: int
    ename: str
    evalue: str
    traceback: str = ""
    failed_at: float = 0.0
    freed: bool = False

    def __str__(self) -> str:
        return f"{self.ename}: {self.evalue}" if self.evalue else self.ename


class SpmdError(GpuPoolError):
    """A cell or function raised on one or more ranks.

    `errors` maps rank to `RankError`; `first` is the one that failed first, which is shown in full.
    """

    def __init__(self, errors: Mapping[int, RankError], world_size: int) -> None:
        self.errors = dict(sorted(errors.items()))
        self.world_size = world_size
        self.first = min(self.errors.values(), key=lambda e: (e.freed, e.failed_at, e.rank))
        super().__init__(self._message())

    def __reduce__(self) -> tuple[type[SpmdError], tuple[dict[int, RankError], int]]:
        return type(self), (self.errors, self.world_size)

    def others(self) -> dict[str, list[int]]:
        """What the other ranks raised -> their ranks, equal errors together."""
        folded: dict[str, list[int]] = {}
        for error in self.errors.values():
            if error is not self.first:
                text = "freed from waiting for it" if error.freed else str(error)
                folded.setdefault(text, []).append(error.rank)
        return folded

    def _message(self) -> str:
        same = 1 + len(self.others().get(str(self.first), ()))
        failed = 1 + sum(e is not self.first and not e.freed for e in self.errors.values())
        # The count goes to the end of the first line: a long message must not push it out of sight.
        head, newline, rest = str(self.first).partition("\n")
        if same == failed > 1:
            head = f"{head} (the same on {failed} of {self.world_size} ranks)"
        else:
            head = f"rank {self.first.rank}: {head} ({failed} of {self.world_size} ranks failed)"
        return head + newline + rest

    def _render_traceback_(self) -> list[str]:
        """The traceback of the rank that failed first; the other ranks in one line each kind."""
        lines = [f"SpmdError: {self}"]
        # an error of ours has no traceback but its message, which is said already
        if self.first.traceback.strip() not in ("", str(self.first)):
            lines += ["", f"rank {self.first.rank}:", self.first.traceback]
        for text, ranks in self.others().items():
            if text != str(self.first):
                lines.append(f"rank {', '.join(map(str, ranks))}: {text}")
        return lines


class DataError(GpuPoolError):
    """A datastore cannot be listed or read."""


class DataNotFoundError(DataError):
    """There is no such bucket, folder or object, or it holds nothing readable."""


class CredentialsError(DataError):
    """The object store refused the credentials, or found none."""


class TrainingError(GpuPoolError):
    """Training or prediction cannot start or go on."""
