"""Every error gpupool raises on purpose. Runs anywhere.

    GpuPoolError                  one sentence: what happened, where, what to do
    ├── OptionsError (ValueError) an option is unknown, malformed or without effect
    ├── PlacementError            the devices asked for are not there, or in use
    ├── PoolError                 the pool cannot do this now
    │   ├── NoPoolError           no pool runs in this notebook
    │   ├── PoolStartError        the pool did not come up; nothing was left running
    │   ├── GroupError            the process group was not formed; the next run tries again
    │   ├── EngineDiedError       an engine process is gone
    │   ├── UnansweredError       an engine does not answer
    │   ├── ParcelsLostError      a rank does not have what was sent to it before
    │   └── StillRunningError (TimeoutError)  a result was waited for, but not for long enough
    ├── CompositeError (TypeError)  a handle was used in the place of the values on the ranks
    ├── TransferError             a variable cannot be sent to the ranks; none has run
    ├── SpmdError                 a cell or function raised on one or more ranks: .errors[rank]
    ├── DataError                 a datastore cannot be listed or read
    │   ├── DataNotFoundError     nothing there
    │   ├── CredentialsError      the store refused the credentials
    │   └── SampleError           one sample cannot be read: .reason
    │       └── MissingSampleError (DataNotFoundError)  it is gone
    └── TrainingError             train() or predict() cannot continue

Programs tell them apart by class, and those of data by `kind`, as the wording may change.
In IPython these show as their message alone: the user's own line is the cell just above it,
and none of our frames would help. `RankError` is not raised: it is what `SpmdError` holds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gpupool.core.formatting import format_ranks
from gpupool.core.terminal import CODES, plain, shows_colours


class GpuPoolError(Exception):
    """Base of all errors that gpupool raises on purpose; its text is one complete message."""

    def _render_traceback_(self) -> list[str]:  # IPython's documented hook
        return [f"{type(self).__name__}: {self}"]


class OptionsError(GpuPoolError, ValueError):
    """An option is unknown, malformed, contradicts another one, or would have no effect."""


class PlacementError(GpuPoolError):
    """The devices asked for do not exist, are too few, or are in use by another pool."""


class PoolError(GpuPoolError):
    """The pool cannot do what was asked in its present state; `ranks` are those concerned."""

    def __init__(self, message: str = "", *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)  # alone, so that it can be pickled: the rest is in __dict__
        self.ranks = tuple(ranks)


class NoPoolError(PoolError):
    """No pool runs in this notebook."""


class PoolStartError(PoolError):
    """The pool did not come up. Whatever had been started is stopped again."""


class GroupError(PoolError):
    """The ranks are there, and have what they had, but their process group was not formed."""


class EngineDiedError(PoolError):
    """The process of an engine has ended; at `died_at` (seconds since the epoch), if known."""

    def __init__(self, message: str = "", died_at: float | None = None) -> None:
        super().__init__(message)
        self.died_at = died_at


class UnansweredError(PoolError):
    """Engines that live do not answer."""


class StillRunningError(PoolError, TimeoutError):
    """A result was waited for, but not for long enough."""


class Pruned(GpuPoolError):  # noqa: N818 - it is no error
    """A trial of a sweep is not worth its time any more: `gpupool.report` raises it in there."""


class ParcelsLostError(PoolError):
    """A rank does not have what was sent to it before; the next run sends it again."""


class CompositeError(GpuPoolError, TypeError):
    """A Composite was changed, called or computed with, as if it were the ranks' values."""


class TransferError(GpuPoolError):
    """Variables of the notebook cannot be sent to the ranks; no rank has run.

    `reasons` maps each name to what is wrong with its value.
    """

    def __init__(self, reasons: Mapping[str, str], what: str = "cell") -> None:
        self.reasons, self._what = dict(reasons), what
        listed = "\n".join(f"  {name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(
            f"The {what} was not run: these variables cannot be sent to the ranks:\n{listed}\n"
            f"Create them inside the {what} instead"
            f"{', or run it with --isolate, which sends nothing' if what == 'cell' else ''}."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reasons, self._what)


@dataclass(frozen=True, slots=True)
class RankError:
    """What one rank raised, as plain data.

    `traceback` is IPython's text (with ANSI colours), without frames of gpupool. `failed_at` is the
    engine's wall clock in seconds since the epoch. `freed`: it raised only because another rank had
    failed before. `where` is the innermost line of the notebook, as "Cell In[12], line 3"; `was`
    where the rank was when it was freed or killed: "in all_reduce (Cell In[12], line 3)" or "at
    Cell In[12], line 7". `hint` are lines that say more, such as what fills the memory. `by_user`:
    the user wanted the end. `host` is named if the pool is on several.
    """

    rank: int
    ename: str
    evalue: str
    traceback: str = ""
    failed_at: float = 0.0
    freed: bool = False
    where: str = ""
    was: str = ""
    hint: str = ""
    by_user: bool = False
    host: str = ""

    @property
    def freed_from(self) -> str:
        """In what a rank waited that was freed, as far as is known."""
        if self.was:
            return f"{'waiting' if self.was.startswith('in ') else 'stopped'} {self.was}"
        # A busy rank may not say where it is, but its traceback does. Only lines with an arrow:
        # those around them may name collectives that were not called.
        lines = "\n".join(_ARROW.findall(CODES.sub("", self.traceback)))
        found: list[str] = _COLLECTIVE.findall(lines)  # the outermost, which the user called, first
        # `wait` alone says least: it ends an asynchronous collective whose name came before.
        named = [name for name in found if name != "wait"] or found or ["a collective"]
        return f"waiting in {named[0]}" + (f" ({self.where})" if self.where else "")

    @property
    def place(self) -> str:
        """Where it was interrupted: "in barrier (Cell In[3], line 5)", or as much as is known."""
        if self.was.startswith("in ") or not self.where:
            return self.was
        return f"at {self.where}"

    def __str__(self) -> str:
        return f"{self.ename}: {self.evalue}" if self.evalue else self.ename


class SpmdError(GpuPoolError):
    """A cell or function raised on one or more ranks.

    `errors` maps rank to `RankError`; `first` is the one that failed first, which is shown in full.
    `num_ranks` is how many ranks ran it, `ranks` those that have failed.
    """

    def __init__(self, errors: Mapping[int, RankError], num_ranks: int) -> None:
        self.errors = dict(sorted(errors.items()))
        self.num_ranks = num_ranks
        self.first = min(self.errors.values(), key=_by_importance)
        # Set by a view that has just shown the tracebacks: IPython must not print them again.
        self.is_shown = False
        self.ranks = tuple(self.errors)
        super().__init__(self._message())
        # Python's own excepthook, pytest and logging print notes below the message.
        self.add_note(CODES.sub("", "\n".join(self.details())))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, self.num_ranks)

    def named(self, ranks: Iterable[int]) -> str:
        """These ranks, with their hosts."""
        return format_ranks(ranks, {rank: one.host for rank, one in self.errors.items()})

    def others(self) -> dict[str, list[int]]:
        """What the other ranks raised, and where -> their ranks, equal errors together."""
        folded: dict[str, list[int]] = {}
        for error in self.errors.values():
            if error is not self.first:
                folded.setdefault(_kind(error), []).append(error.rank)
        return folded

    @property
    def by_user(self) -> bool:
        """Whether nothing has failed: the user has interrupted the ranks."""
        return self.first.by_user

    def interrupted_text(self) -> str:
        """Where the ranks were that the user has interrupted, each place once."""
        places: dict[str, list[int]] = {}
        for error in self.errors.values():
            places.setdefault(error.place, []).append(error.rank)
        # The rank that the others waited for comes first, as in other errors.
        there = sorted(places.items(), key=lambda one: self.first.rank not in one[1])
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {self.named(ranks)} {place}" for place, ranks in there
        ]
        text = f"interrupted by you: {'; '.join(map(str.rstrip, parts))}"
        cells = set(_CELL.findall(text))
        return text.replace(cells.pop(), "") if len(cells) == 1 else text

    def _message(self) -> str:
        if self.by_user:
            return f"{self.first.ename}: {self.interrupted_text()}"
        same = 1 + len(self.others().get(_kind(self.first), ()))
        ended = [e for e in self.errors.values() if e is not self.first and e.freed]
        stopped = sum(e.was.startswith("at ") for e in ended)
        freed, failed = len(ended) - stopped, len(self.errors) - len(ended)
        if same == failed > 1:
            rank, facts = "", [f"the same on {failed} of {self.num_ranks} ranks"]
        else:
            rank = f"rank {self.named([self.first.rank])}: "
            facts = [f"{failed} of {self.num_ranks} ranks failed"]
        if freed:
            facts.append(f"{freed} {'was' if freed == 1 else 'were'} waiting")
        if stopped:
            facts.append(f"{stopped} stopped")
        how_many = ", ".join(facts) + (f"; {self.first.where}" if self.first.where else "")
        # They go to the end of the first line: a long message must not push them out of sight.
        head, newline, rest = str(self.first).partition("\n")
        if len(head) > _MAX_HEAD_CHARS:
            head = f"{head[:_MAX_HEAD_CHARS]} [...]"
        return f"{rank}{head} ({how_many}){newline}{rest}"

    def details(self) -> list[str]:
        """The traceback of the rank that failed first; the other ranks in one line each kind."""
        lines = []
        # An error of ours has no traceback but its message, which the first line has already.
        if self.first.traceback.strip() not in ("", str(self.first)):
            first = self.named([self.first.rank])
            lines += ["", f"rank {first}:", self.first.traceback.rstrip("\n")]
        if self.first.hint:
            lines += ["", self.first.hint]
        others = [
            f"rank {self.named(ranks)}: {text}"
            for text, ranks in self.others().items()
            if text != _kind(self.first)
        ]
        return [*lines, *([""] if lines and others else []), *others]

    def _render_traceback_(self) -> list[str]:
        _leave_out_our_frames(self.__traceback__)  # `%debug` then begins at the user's line
        is_shown, self.is_shown = self.is_shown, False
        lines = [f"SpmdError: {self}", *([] if is_shown else self.details())]
        return lines if shows_colours(sys.stdout) else [CODES.sub("", line) for line in lines]


_MAX_HEAD_CHARS = 2000  # of the first line of a rank's message, in ours
_ARROW = re.compile(r"^-+> *\d+ (.*)$", re.MULTILINE)  # at the lines where a rank was
_COLLECTIVE = re.compile(
    r"\b(all_reduce|all_gather\w*|all_to_all\w*|reduce_scatter\w*|monitored_barrier|barrier"
    r"|broadcast\w*|scatter\w*|gather\w*|reduce|send|recv|isend|irecv|wait)\("
)
_CELL = re.compile(r"Cell In\[\d+\], (?=line)")
_OURS = str(Path(__file__).parent.parent)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")  # of an object: another one on every rank


def _by_importance(error: RankError) -> tuple[object, ...]:
    """What nobody has asked for comes first, then what happened first.

    A rank that was freed says nothing about the cause, and an interrupt is the user's own doing.
    """
    return error.freed, error.ename == "KeyboardInterrupt", error.failed_at, error.rank


def _kind(error: RankError) -> str:
    if error.freed:
        return error.freed_from
    what = _ADDRESS.sub("0x...", str(error))
    if error.was and not error.where:  # it was killed
        return f"{what} (was {error.was})"
    return f"{what} ({error.where})" if error.where else what


def _leave_out_our_frames(frames: TracebackType | None) -> None:
    """Take frames of ours, and of the magic, out of a traceback, but the first, IPython's."""
    while frames is not None:
        while frames.tb_next is not None and _is_ours(frames.tb_next):
            frames.tb_next = frames.tb_next.tb_next
        frames = frames.tb_next


def _is_ours(frame: TracebackType) -> bool:
    code = frame.tb_frame.f_code
    calls_magic = code.co_name in ("run_cell_magic", "run_line_magic", "decorator")
    return code.co_filename.startswith(_OURS) or (calls_magic and "IPython" in code.co_filename)


class DataError(GpuPoolError):
    """A datastore cannot be listed or read. Its text quotes names and contents of files.

    `kind` is what happened, in one or two words: see docs/guides/faults.md. `url` is the printable
    URL of what could not be read or written.
    """

    def __init__(self, message: str = "", kind: str = "", url: str = "") -> None:
        super().__init__(plain(message))
        self.kind, self.url = kind, url


class DataNotFoundError(DataError):
    """There is no such bucket, folder or object, or it holds nothing readable."""


class CredentialsError(DataError):
    """The object store refused the credentials, or found none."""


class SampleError(DataError):
    """One sample cannot be read, and others can: what `on_error="skip"` may leave out.

    `url` is its printable URL; `reason`, which is its `kind` too, is "missing", "changed", "empty",
    "damaged", "animated", "pages" (several, of a TIFF), "too large", "too small" for a patch, or
    the format of a file that is to be converted, as "HEIC".
    """

    def __init__(self, message: str, url: str = "", reason: str = "damaged") -> None:
        super().__init__(message, reason, url=url)
        self.reason = reason


class MissingSampleError(SampleError, DataNotFoundError):
    """A sample that was listed is not there any more."""


class TrainingError(GpuPoolError):
    """Training or prediction cannot start or continue."""
