"""Whatever was raised, as plain data: where it was, and a traceback of the user's frames alone.

Runs on engines. Nothing of the exception itself travels: its class may be known here only, and
what it holds may not be picklable.
"""

from __future__ import annotations

import contextlib
import dis
import re
import time
import traceback
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any

from IPython.core import ultratb

from gpupool.core.errors import RankError
from gpupool.core.wire.replies import Raised
from gpupool.engine import calls
from gpupool.engine.cells import debug, error_hints
from gpupool.engine.cells.error_hints import text_of
from gpupool.engine.group import forming
from gpupool.engine.output.channel import encodable
from gpupool.engine.process import this_rank
from gpupool.engine.shell.cell_names import MACHINERY, TORCH, cell_of, is_users, place
from gpupool.engine.shell.shell import this_shell

MAX_MESSAGE_CHARS = 20_000
MAX_TEXT_CHARS = 60_000  # of a traceback
MAX_FRAMES = 24  # of one exception; the middle is left out
MAX_CHAIN = 8  # exceptions behind one another
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
    is_earlier = _is_collective(error) and forming.is_of_earlier(text_of(error), frames)
    _trim(error)
    hint = error_hints.CONTEXT_LOST if error_hints.is_context_lost(*chain) else ""
    described = RankError(
        rank=this_rank().rank,
        ename=_kind(error).__name__,
        evalue=forming.EARLIER if is_earlier else _message(error),
        # all ranks that are freed format theirs at one moment
        traceback=_plain(error, chain=False) if is_freed else shown(error),
        failed_at=failed_at,
        where=_where(error),
        hint=hint,
    )
    if any(map(error_hints.is_out_of_memory, chain)):
        error_hints.release(frames)
    else:
        debug.remember(error)
    return Raised(described, collective=collective and not is_earlier)


# ---- what is said ----------------------------------------------------------------------------


def _kind(error: BaseException) -> type:
    """Its class. Python 3.13 raises a SyntaxError under a private name when a cell ends early."""
    kinds = type(error).__mro__
    return next((kind for kind in kinds if not kind.__name__.startswith("_")), kinds[0])


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"  # its own text names a temporary file
    text = text_of(error)
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
    text = text_of(error).lower()
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
        if code.co_filename.startswith(MACHINERY):
            in_magic = in_magic or code.co_name in ("run_cell_magic", "run_line_magic")
            continue
        leads = (TORCH, contextlib.__file__)  # torch's decorators are of contextlib
        if code.co_filename.startswith(leads) and (not kept or code.co_name in _CALLS_MODULE):
            continue
        if "__tracebackhide__" in frame.tb_frame.f_locals:  # a handler of signals
            continue
        if in_magic and code.co_name == "<module>" and cell_of(shell, code.co_filename):
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


def shown(error: BaseException) -> str:
    """The error and those behind it, the first cause first, with the user's frames alone."""
    _trim(error)
    try:
        text = _formatted(error)
    except Exception:  # IPython's formatting asks the exception and its frames for things
        text = _plain(error)
    return _cut(text, MAX_TEXT_CHARS)


def _formatted(error: BaseException) -> str:
    shell, kind, chain = this_shell(), _kind(error), _chain(error)
    if hasattr(error, "_render_traceback_") and not _where(error):  # one of ours, in our own code
        return "\n".join(error._render_traceback_())
    if any(isinstance(one, BaseExceptionGroup) for one in chain):  # as IPython does
        return _plain(error)
    if isinstance(error, SyntaxError):
        entries = traceback.extract_tb(error.__traceback__)
        return str(
            shell.SyntaxTB.stb2text(shell.SyntaxTB.structured_traceback(kind, error, entries))
        )
    notes = []
    if len(chain) > MAX_CHAIN:
        chain[MAX_CHAIN // 2 - 1].__cause__ = chain[-(MAX_CHAIN // 2)]
        notes.append(f"[{len(chain) - MAX_CHAIN} exceptions in the middle are left out]")
    for frames in (_frames(one.__traceback__) for one in chain):
        if len(frames) > MAX_FRAMES:
            frames[MAX_FRAMES // 2 - 1].tb_next = frames[-(MAX_FRAMES // 2)]
            notes.append(f"[{len(frames) - MAX_FRAMES} frames in the middle are left out]")
    formatter = shell.InteractiveTB
    lines = formatter.structured_traceback(kind, error, error.__traceback__, tb_offset=0)
    return str(formatter.stb2text([*notes[:MAX_CHAIN], *lines]))


def _plain(error: BaseException, chain: bool = True) -> str:
    """As Python writes it, which takes a thirtieth of the time."""
    shell = this_shell()

    def name_cell(found: re.Match[str]) -> str:
        return cell_of(shell, found[1]) or found[0]

    return re.sub(
        r'File "(.+?)"', name_cell, "".join(traceback.format_exception(error, chain=chain))
    )


def show_source_of_cells() -> None:
    """Have IPython show all code of cells alike, by `stack_data`, as it does on a terminal.

    The notebook's cells have the names of files that do not exist, of which it would show the line
    where their frame is now: in an `except` clause perhaps.
    """
    module: Any = ultratb
    plain = module.get_line_number_of_frame

    def num_lines(frame: FrameType) -> int:
        return 0 if cell_of(this_shell(), frame.f_code.co_filename) else plain(frame)

    module.get_line_number_of_frame = num_lines


def _cut(text: str, max_chars: int) -> str:
    text = encodable(text)
    if len(text) <= max_chars:
        return text
    head = max_chars // 3
    note = f"\n[... {len(text) - max_chars} characters left out ...]\n"
    return text[:head] + note + text[head - max_chars :]
