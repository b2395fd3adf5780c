"""stdout and stderr of an engine. Runs on engines.

ipykernel gives each stream a buffer of its own, which loses their order, and reads what C code and
child processes write to descriptors 1 and 2 in its own time. Here both write to one channel.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import functools
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ipykernel.iostream import OutStream
from jupyter_client.session import extract_header

from gpupool.engine.output.channel import Channel


class OrderedStream(OutStream):
    """ipykernel's stream, with the channel in the place of its buffer.

    ipyparallel makes one for stdout and one for stderr (its setting `out_stream_factory`). It has
    what a text stream of a script has (`buffer`, `reconfigure`), and is never closed.
    """

    errors = "strict"
    line_buffering, write_through = True, False

    def __init__(self, session: Any, pub_thread: Any, name: str, **options: Any) -> None:
        channel = getattr(pub_thread, "gpupool_channel", None)
        if channel is None:
            channel = pub_thread.gpupool_channel = Channel(session, pub_thread)
        self._channel: Channel = channel
        super().__init__(session, pub_thread, name, **options)  # type: ignore[no-untyped-call]
        self.write = self._writer()  # type: ignore[assignment, method-assign]
        self._descriptor = _DESCRIPTORS[name]
        self._pipe = os.dup(self._descriptor)  # to have it again when code has closed it
        self.buffer = _Octets(self)
        underlying = getattr(sys, f"__{name}__")
        underlying.reconfigure(line_buffering=True)  # it is shown too: in its place
        _streams.append(self)
        keep_the_call_of_threads()

    def flush(self) -> None:
        """Send what was written, to both streams."""
        if not _forked and self.pub_thread is not None:
            self._channel.flush()

    def close(self) -> None:
        """Flush: what comes next has to be shown too."""
        self.flush()

    def fileno(self) -> int:
        """The descriptor whose text is shown, for child processes. ipykernel gives the log's."""
        return self._descriptor

    def reconfigure(
        self,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        line_buffering: bool | None = None,
        write_through: bool | None = None,
    ) -> None:
        """Take what a script asks of its output. Bytes are read in the encoding; nothing else
        makes a difference here."""
        self.encoding = encoding or self.encoding
        self.errors = errors or ("strict" if encoding else self.errors)
        self.buffer = _Octets(self)
        self.line_buffering = self.line_buffering if line_buffering is None else line_buffering
        self.write_through = self.write_through if write_through is None else write_through

    def restore_descriptor(self) -> bool:
        """Have descriptor 1 or 2 lead here if code has closed it; whether it was another file."""
        try:
            was_another = not os.path.sameopenfile(self._descriptor, self._pipe)
        except OSError:
            os.dup2(self._pipe, self._descriptor)
            return False
        if was_another:
            os.dup2(self._pipe, self._descriptor)
        return was_another

    def latest_parent(self) -> dict[str, Any]:
        """The call that runs, or that ran last."""
        return dict(self._parent_header_global)

    def echo_octets(self, octets: bytes) -> None:
        """Put what was written to the descriptor into the log as well."""
        with contextlib.suppress(OSError):
            os.write(self._original_stdstream_copy, octets)

    def _writer(self) -> Callable[[str], int]:
        """The method `write`. With its names bound: a print of three values calls it six times."""
        name, write = self.name, self._channel.write
        this_call, forked = self._parent_header.get, _forked

        def write_text(string: str) -> int:
            """Receive text. In a forked child it goes the way of what C code writes."""
            if forked:
                _write_all(_DESCRIPTORS[name], string.encode(errors="replace"))
                return len(string)
            try:
                call = this_call()
            except LookupError:  # a thread whose call is unknown
                call = self.parent_header
            write(name, call, string)
            return len(string)

        return write_text

    def _watch_pipe_fd(self) -> None:
        """Receive what comes when nobody writes to the streams; a thread of ipykernel."""
        if self._fid is None:
            return
        self._channel.watch(self, self._fid)
        _buffer_lines_of_c()
        poll = select.poll()
        poll.register(self._fid, select.POLLIN)
        while self._should_watch and any(events & select.POLLIN for _, events in poll.poll()):
            self._channel.read()


class _Octets(io.BufferedIOBase):
    """`sys.stdout.buffer`: takes bytes that are text in the stream's encoding."""

    def __init__(self, stream: OrderedStream) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder(stream.encoding)("replace").decode

    def write(self, octets: Any) -> int:
        """Receive bytes; a character may come in parts."""
        view = memoryview(octets)
        self._stream.write(self._decode(view))
        return view.nbytes

    def flush(self) -> None:
        """As that of the stream."""
        self._stream.flush()

    def close(self) -> None:
        """Flush: a wrapper that goes closes it."""
        self.flush()

    def fileno(self) -> int:
        """As that of the stream."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Bytes can be written."""
        return True


def follow_call(parent: dict[str, Any]) -> None:
    """What is written belongs to this call; ipykernel says so to `sys.stdout`, whoever that is."""
    for own in _streams:
        if getattr(sys, own.name, None) is not own:
            own.parent_header = extract_header(parent)


def restore_streams() -> list[str]:
    """Let `sys.stdout` and `sys.stderr` be streams that work; returns what did not, and why."""
    notes = []
    for own in _streams:
        present = getattr(sys, own.name, None)
        if present is not own and (fault := _fault(present)):
            setattr(sys, own.name, own)
            notes.append(f"sys.{own.name} {fault}. What is written is shown here again.")
        if own.restore_descriptor():
            number = _DESCRIPTORS[own.name]
            notes.append(f"Descriptor {number} was another file. What is written is shown again.")
    return notes


def say(text: str) -> None:
    """Show a line on stderr, whatever code has made of that and of `print`."""
    next(own for own in _streams if own.name == "stderr").write(f"{text}\n")


def _fault(stream: Any) -> str:
    """Why a stream of the user's is of no use; "" if it works. Its text is flushed."""
    if stream is None:
        return "was None"
    held = getattr(stream, "__dict__", {}).values()
    try:
        if any(getattr(each, "closed", False) is True for each in (stream, *held)):
            return "was left with a closed file"
        if not callable(stream.write):
            return "had no method write"
        stream.flush()
    except BaseException as error:  # code of the user's, which an interrupt may end
        return f"could not be flushed ({type(error).__name__}: {error})"
    return ""


@functools.cache
def keep_the_call_of_threads() -> None:
    """Let a thread's output belong to the call that has started it, also when that is over.

    ipykernel takes it for output of the call that runs at the time.
    """
    os.register_at_fork(after_in_child=lambda: _forked.append(True))
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def started(self: threading.Thread) -> None:
        header, run = _streams[0].parent_header, self.run

        def within() -> None:
            vars(self).pop("run", None)  # the thread's own method again
            _adopt(header)
            run()

        if header:
            self.run = within  # type: ignore[method-assign]
        start(self)

    def submitted(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        header = _streams[0].parent_header

        def within() -> Any:  # the thread may have been started by an earlier call
            _adopt(header)
            return fn(*args, **kwargs)

        return submit(self, within)

    threading.Thread.start = started  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign]


# ---- inside ----------------------------------------------------------------------------------


_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_streams: list[OrderedStream] = []
_forked: list[bool] = []  # filled in a child of the engine's process


def _adopt(header: dict[str, Any]) -> None:
    """Let this thread's output belong to the call with this header."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    publishers: list[Any] = [*_streams, getattr(shell, "display_pub", None)]
    for publisher in publishers:
        if hasattr(publisher, "set_thread_parent"):  # of ipykernel 7; 6 does all this itself
            publisher.set_thread_parent(header)


def _write_all(descriptor: int, octets: bytes) -> None:
    view = memoryview(octets)
    while view:
        view = view[os.write(descriptor, view) :]


@functools.cache
def _buffer_lines_of_c() -> None:
    """Let C's stdout give out whole lines: into a pipe it would keep 4 KiB back."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
