"""Whatever was raised, as plain data: where it was, and a traceback of the user's frames alone.

Runs on engines. Nothing of the exception itself travels: its class may be known here only, and
what it holds may not be picklable.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import re
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise
from types import TracebackType
from typing import Any

from gpupool.core.errors import GpuPoolError, RankError
from gpupool.core.wire.replies import Raised
from gpupool.engine import calls
from gpupool.engine.cells import debug, error_hints
from gpupool.engine.group import forming
from gpupool.engine.output.channel import encodable
from gpupool.engine.process import this_rank
from gpupool.engine.shell.cell_names import MACHINERY, TORCH, cell_of, is_users, place
from gpupool.engine.shell.shell import this_shell

MAX_MESSAGE_CHARS = 20_000
MAX_TEXT_CHARS = 60_000  # of a traceback
MAX_FRAMES = 24  # of one exception; the middle is left out
MAX_CHAIN = 8  # exceptions behind one another
MAX_MEMBERS = 8  # of an exception group
_RAISE = dis.opmap["RAISE_VARARGS"]
_CALLS_MODULE = ("_wrapped_call_impl", "_call_impl")  # what lies between `net(x)` and `forward`
_IN_COLLECTIVE = (
    "gloo",
    "nccl",
    "processgroup",
    "connection closed",
    "connection reset",
    "init_process_group: another rank has failed",
)


def describe(error: BaseException) -> Raised:
    """The error as plain data; an exception that comes along has the user's frames alone."""
    was_interrupted = calls.is_interrupted()
    calls.over()
    failed_at = time.time()  # before the formatting, which takes as long as it takes
    chain = _chain(error)
    frames = [frame for one in chain for frame, _ in traceback.walk_tb(one.__traceback__)]
    collective = any(map(_is_collective, chain))
    is_freed = collective and was_interrupted
    if collective and isinstance(error, KeyboardInterrupt):
        _end_before_torch(error)
    is_earlier = _is_collective(error) and forming.is_of_earlier(_text(error), frames)
    _trim(error)
    hint = error_hints.CONTEXT_LOST if error_hints.is_context_lost(*chain) else ""
    kind, names = (error.kind, error.names) if isinstance(error, GpuPoolError) else ("", ())
    kind = "earlier group" if is_earlier else kind
    described = RankError(
        rank=this_rank().rank,
        ename=_kind(error).__name__,
        evalue=forming.EARLIER if is_earlier else _message(error),
        traceback=_cut((_plain if is_freed else _formatted)(error), MAX_TEXT_CHARS),
        failed_at=failed_at,
        where=_where(error),
        hint=hint,
        kind=kind,
        names=names,
    )
    if error_hints.memory_is_out(error):
        error_hints.release(frames)
    else:
        debug.remember(error)
    return Raised(described, collective=collective and not is_earlier)


# ---- what is said ----------------------------------------------------------------------------


def _kind(error: BaseException) -> type:
    """Its class. Python 3.13 raises a SyntaxError under a private name when a cell ends early."""
    kinds = type(error).__mro__
    return next((kind for kind in kinds if not kind.__name__.startswith("_")), kinds[0])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failure:  # a class of the user's, which may do anything
        return f"<no message: its __str__ raised {type(failure).__name__}>"


def _is_printable(error: BaseException) -> bool:
    try:
        str(error)
    except BaseException:
        return False
    return True


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"  # its own text names a temporary file
    text = _text(error)
    if isinstance(error, BaseExceptionGroup):
        named = [f"{_kind(e).__name__}: {_message(e)}" for e in error.exceptions[:3]]
        text = f"{text}: {'; '.join(named)}{'; ...' * (len(error.exceptions) > 3)}"
    text = "; ".join([text, *map(str, getattr(error, "__notes__", ()))])
    return _cut(text, MAX_MESSAGE_CHARS)


def _where(error: BaseException) -> str:
    """The innermost line in a cell of the notebook, else in a file of the user's, else ""."""
    shell = this_shell()
    found = ""
    for frame in _frames(error.__traceback__):
        name, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
        cell = cell_of(shell, name)
        if cell or (is_users(name) and not found.startswith("Cell ")):
            found = f"{cell or place(name)}, line {line}"
    if isinstance(error, SyntaxError) and error.filename:
        cell = cell_of(shell, error.filename)
        if cell or not found:
            found = f"{cell or place(error.filename)}, line {error.lineno}"
    return found


def _is_collective(error: BaseException) -> bool:
    """Whether it came out of torch.distributed."""
    frames = _frames(error.__traceback__)
    code = frames[-1].tb_frame.f_code if frames else None
    last = code.co_filename if code else ""
    if last.startswith(f"{TORCH}distributed/"):
        return True
    by_statement = code is not None and code.co_code[frames[-1].tb_lasti] == _RAISE
    if by_statement and not last.startswith((TORCH, *MACHINERY)):
        return False  # not by a group, in C: whoever wrote it may speak of any connection
    text = _text(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _IN_COLLECTIVE)


# ---- the frames ------------------------------------------------------------------------------


def _frames(frames: TracebackType | None) -> list[TracebackType]:
    listed = []
    while frames is not None:
        listed.append(frames)
        frames = frames.tb_next
    return listed


def _trim(error: BaseException) -> None:
    """Cut the tracebacks of an exception, and of those behind and in it, to the user's frames."""
    for one in _chain(error):
        kept = _users(_frames(one.__traceback__))
        for frame, following in pairwise([*kept, None]):
            frame.tb_next = following  # type: ignore[union-attr]
        one.__traceback__ = kept[0] if kept else None
        if isinstance(one, BaseExceptionGroup):
            for member in one.exceptions:
                _trim(member)


def _end_before_torch(error: BaseException) -> None:
    """Of an interrupt in a collective only the user's line is of use: it met torch anywhere."""
    error.__cause__, error.__suppress_context__ = None, True
    frames = _frames(error.__traceback__)
    while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename.startswith(TORCH):
        frames.pop()
    if frames:
        frames[-1].tb_next = None


def _users(frames: list[TracebackType]) -> list[TracebackType]:
    """The frames without those that lead to the user's code, torch's too, and those of machinery.

    So go those by which torch calls a module's `forward`: they say nothing of the error.
    The line of a magic goes too if a line of the magic's own code follows.
    """
    shell, kept = this_shell(), list[TracebackType]()
    in_magic = False
    for frame in frames:
        code = frame.tb_frame.f_code
        if code.co_filename.startswith((*MACHINERY, "<frozen runpy>")):  # of `%run -m`
            in_magic = in_magic or code.co_name in ("run_cell_magic", "run_line_magic", "run_magic")
            continue
        leads = (TORCH, contextlib.__file__)  # torch's decorators are of contextlib
        if code.co_filename.startswith(leads) and (not kept or code.co_name in _CALLS_MODULE):
            continue
        if "__tracebackhide__" in frame.tb_frame.f_locals:  # a handler of signals
            continue
        if in_magic and cell_of(shell, code.co_filename):
            kept.pop()
        in_magic = False
        kept.append(frame)
    return kept


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and those that it came from, the first cause last; each once."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is one for one in found):
        found.append(current)
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    return found


# ---- the text --------------------------------------------------------------------------------


def _formatted(error: BaseException, depth: int = 0) -> str:
    """The exceptions of the chain one after the other, the first cause first."""
    if hasattr(error, "_render_traceback_") and not _where(error):  # one of ours, in our own code
        return "\n".join(error._render_traceback_())
    chain = _chain(error)
    left_out = len(chain) - MAX_CHAIN
    if left_out > 0:
        chain = [*chain[: MAX_CHAIN // 2], *chain[-(MAX_CHAIN // 2) :]]
    parts = []
    for one in chain:
        parts.append(_formatted_one(one, depth))
        if one is not chain[-1]:
            parts.append(_DIRECT if one.__cause__ is not None else _DURING)
    if left_out > 0:
        parts.append(f"[{left_out} exceptions in the middle are left out]")
    return "\n\n".join(reversed(parts))


# The line of `%%spmd` itself, which is an empty one here.
_FIRST_EMPTY = re.compile(r"\n(?:\x1b\[[0-9;]*m|[ ])+1(?:\x1b\[[0-9;]*m|[ ])*\n")
_DIRECT = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"


def _formatted_one(error: BaseException, depth: int) -> str:
    try:
        lines = _lines(error)
    except Exception:  # IPython's formatting asks the exception and its frames for things
        lines = [_plain(error)]
    if isinstance(error, BaseExceptionGroup) and depth < 3:
        for number, member in enumerate(error.exceptions[:MAX_MEMBERS], start=1):
            lines.append(f"  +---------------- {number} ----------------")
            indented = _formatted(member, depth + 1).strip("\n").replace("\n", "\n  | ")
            lines.append(f"  | {indented}")
        if len(error.exceptions) > MAX_MEMBERS:
            lines.append(f"  | and {len(error.exceptions) - MAX_MEMBERS} more")
    return "\n".join(lines)


def _plain(error: BaseException) -> str:
    """An exception without those behind it, and without the source around its lines.

    It takes a thirtieth of the time: all ranks that are freed format theirs at one moment.
    """
    shell, parts = this_shell(), []
    for frame in traceback.extract_tb(error.__traceback__):
        where = cell_of(shell, frame.filename) or place(frame.filename)
        parts.append(f"{where}, line {frame.lineno}, in {frame.name}\n    {frame.line}")
    return "\n".join([*parts, f"{_kind(error).__name__}: {_text(error)}"])


def _lines(error: BaseException) -> list[str]:
    shell, kind = this_shell(), _kind(error)
    frames = _frames(error.__traceback__)
    if isinstance(error, SyntaxError):
        shown = traceback.extract_tb(error.__traceback__)
        return list(shell.SyntaxTB.structured_traceback(kind, error, shown))
    if not frames:
        return traceback.format_exception_only(error)
    left_out = len(frames) - MAX_FRAMES
    if left_out > 0:
        frames[MAX_FRAMES // 2 - 1].tb_next = frames[-(MAX_FRAMES // 2)]
    behind = error.__cause__, error.__context__, error.__suppress_context__
    error.__cause__ = None  # IPython would format those behind it as well
    try:
        with _lines_of_frames(shell.InteractiveTB, frames):
            lines = list(
                shell.InteractiveTB.structured_traceback(kind, error, frames[0], tb_offset=0)
            )
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = behind
    if left_out > 0:
        lines.insert(-1, f"[{left_out} frames in the middle are left out]\n")
    if not _is_printable(error):
        lines[-1] = f"{kind.__name__}: {_text(error)}"
    # The last is the message, which stays as it is.
    return [*(_FIRST_EMPTY.sub("\n", line) for line in lines[:-1]), lines[-1]]


@contextlib.contextmanager
def _lines_of_frames(formatter: Any, frames: list[TracebackType]) -> Iterator[None]:
    """Have IPython take a cell's line from the traceback, and number the lines around it rightly.

    It takes the line from the frame, which may have continued since, in an `except` clause. And it
    numbers what it shows from the first line of the code: of a comprehension it shows the function.
    """
    lines = {id(frame.tb_frame): frame.tb_lineno for frame in frames}
    plain = formatter.get_records

    def get_records(*args: Any) -> Any:
        records = plain(*args)
        for record in records:
            if record._sd is None:
                record.lineno = lines.get(id(record.frame), record.lineno)
                with contextlib.suppress(OSError):  # no source
                    first = max(1, inspect.getsourcelines(record.code)[1])
                    record.code = record.code.replace(co_firstlineno=first)
        return records

    formatter.get_records = get_records
    try:
        yield
    finally:
        del formatter.get_records


def _cut(text: str, max_chars: int) -> str:
    text = encodable(text)
    if len(text) <= max_chars:
        return text
    head = max_chars // 3
    note = f"\n[... {len(text) - max_chars} characters left out ...]\n"
    return text[:head] + note + text[head - max_chars :]
