"""Whatever was raised, as plain data: where it was, and a traceback of the user's frames alone.

Runs on engines. Nothing of the exception itself travels: its class may be known here only, and
what it holds may not be picklable. Some errors have consequences: a lack of memory releases the
frames that hold tensors, and a GPU whose context is lost is of no use to this process any more.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType, TracebackType

import torch

from gpupool.core.errors import RankError
from gpupool.core.wire.replies import Raised
from gpupool.data import device as devices
from gpupool.engine import calls
from gpupool.engine.cells import debug
from gpupool.engine.group import forming
from gpupool.engine.output.channel import encodable
from gpupool.engine.process import this_rank
from gpupool.engine.shell import MACHINERY, TORCH, cell_of, innermost, this_shell

MAX_CHARS = 40_000  # of a message, and of a traceback
_OF_A_GROUP = ("gloo", "pair.cc", "nccl", "processgroup", "another rank has failed")
_CONTEXT_LOST = (
    "The GPU context of this rank is lost: nothing on its GPU works in this process any more. CUDA "
    "reports such an error late, so it may come from an earlier line: `import os; "
    'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"`, `%gpupool env CUDA_LAUNCH_BLOCKING` and '
    "`%gpupool restart` have the next one name its own line."
)


def describe(error: BaseException) -> Raised:
    """The error as plain data; an exception that comes along has the user's frames alone."""
    was_interrupted = calls.is_interrupted()
    calls.over()
    failed_at = time.time()  # before the formatting, which takes as long as it takes
    chain = _chain(error)
    frames = [frame for one in chain for frame, _ in traceback.walk_tb(one.__traceback__)]
    is_earlier = _is_collective(error) and forming.is_of_earlier(frames)
    collective = not is_earlier and any(map(_is_collective, chain))
    described = RankError(
        rank=this_rank().rank,
        ename=type(error).__name__,
        evalue=forming.EARLIER if is_earlier else _message(error),
        # all ranks that are freed format theirs at one moment
        traceback=shown(error, with_source=not (collective and was_interrupted)),
        failed_at=failed_at,
        where=_where(error),
        hint=_CONTEXT_LOST if is_context_lost(*chain) else "",
    )
    if any(map(_is_out_of_memory, chain)):
        _release(frames)
    else:
        debug.remember(error)
    return Raised(described, collective)


# ---- what is said ----------------------------------------------------------------------------


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failure:  # a class of the user's, which may do anything
        return f"<no message: its __str__ raised {type(failure).__name__}>"


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"  # its own text names a temporary file
    return _cut("; ".join([text_of(error), *map(str, getattr(error, "__notes__", ()))]))


def _where(error: BaseException) -> str:
    lines = [(one.tb_frame.f_code.co_filename, one.tb_lineno) for one in _frames(error)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((error.filename, error.lineno or 0))
    return innermost(lines)


def _cut(text: str) -> str:
    text = encodable(text)
    if len(text) <= MAX_CHARS:
        return text
    head = MAX_CHARS // 3
    note = f"\n[... {len(text) - MAX_CHARS} characters left out ...]\n"
    return text[:head] + note + text[head - MAX_CHARS :]


# ---- what it was -----------------------------------------------------------------------------


def _is_collective(error: BaseException) -> bool:
    last = _frames(error)[-1:]
    if last and last[0].tb_frame.f_code.co_filename.startswith(f"{TORCH}distributed/"):
        return True
    text = text_of(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _OF_A_GROUP)


def _is_out_of_memory(error: BaseException) -> bool:
    is_hosts = isinstance(error, MemoryError) or "DefaultCPUAllocator: " in text_of(error)
    return is_hosts or isinstance(error, torch.OutOfMemoryError)


def _release(frames: Sequence[FrameType]) -> None:
    """Give back the memory that only an error's frames hold, and what torch keeps for later."""
    debug.forget()
    for frame in frames:
        with contextlib.suppress(RuntimeError):  # it still runs
            frame.clear()
            # Python 3.11 keeps a copy of the variables once these were asked for; this renews it
            _ = frame.f_locals
    gc.collect()
    if gpu := devices.gpu_in_use():
        gpu.free_cache()


def is_context_lost(*errors: BaseException) -> bool:
    """Whether one of these came from CUDA and the GPU can be used no more in this process."""
    if not any(isinstance(e, RuntimeError) and "cuda" in text_of(e).lower() for e in errors):
        return False
    try:
        # Asked, not waited for: another rank may be late in a collective that is under way.
        if gpu := devices.gpu_in_use():
            gpu.is_done()
    except RuntimeError:
        return True
    return False


# ---- the frames, and the text ----------------------------------------------------------------


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and those that it came from, the first cause last; each once."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is one for one in found):
        found.append(current)
        is_hidden = current.__suppress_context__
        current = current.__cause__ or (None if is_hidden else current.__context__)
    return found


def _frames(error: BaseException) -> list[TracebackType]:
    listed, frame = [], error.__traceback__
    while frame is not None:
        listed.append(frame)
        frame = frame.tb_next
    return listed


def _trim(error: BaseException) -> None:
    """Cut the tracebacks of an exception, and of those behind and in it, to the user's frames."""
    for one in _chain(error):
        kept = _users(_frames(one))
        for frame, following in pairwise([*kept, None]):
            frame.tb_next = following  # type: ignore[union-attr]
        one.__traceback__ = kept[0] if kept else None
        for member in one.exceptions if isinstance(one, BaseExceptionGroup) else ():
            _trim(member)


def _users(frames: list[TracebackType]) -> list[TracebackType]:
    """The frames without those of machinery, ours or torch's, whose message says more; and without
    the line of a magic if a line of the magic's own code follows."""
    kept, in_magic = list[TracebackType](), False
    for frame in frames:
        code = frame.tb_frame.f_code
        if code.co_filename.startswith(MACHINERY):
            in_magic = in_magic or code.co_name in ("run_cell_magic", "run_line_magic")
            continue
        if "__tracebackhide__" in frame.tb_frame.f_locals:  # a handler of signals
            continue
        if in_magic and code.co_name == "<module>" and cell_of(code.co_filename):
            kept.pop()
        in_magic = False
        kept.append(frame)
    return kept


def shown(error: BaseException, with_source: bool = True) -> str:
    """The error and those behind it, the first cause first, with the user's frames alone."""
    _trim(error)
    is_odd = any(isinstance(one, (BaseExceptionGroup, SyntaxError)) for one in _chain(error))
    with contextlib.suppress(Exception):  # these ask the exception and its frames for things
        if hasattr(error, "_render_traceback_") and not _where(error):  # ours, in our own code
            return _cut("\n".join(error._render_traceback_()))
        if with_source and not is_odd:
            formatter = this_shell().InteractiveTB
            parts = formatter.structured_traceback(type(error), error, error.__traceback__, 0)
            return _cut(formatter.stb2text(parts))
    # as Python does, in a thirtieth of the time, and groups too
    text = "".join(traceback.format_exception(error, chain=with_source))
    return _cut(re.sub(r'File "(.+?)"', lambda found: cell_of(found[1]) or found[0], text))
