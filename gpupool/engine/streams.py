"""stdout and stderr of an engine. Runs on engines.

ipykernel gives each stream a buffer of its own, which loses their order, and reads what C code and
child processes write to descriptors 1 and 2 in its own time. Here both write to one channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ipykernel.iostream import OutStream

from gpupool.engine.channel import Channel


class OrderedStream(OutStream):
    """ipykernel's stream, with the channel in the place of its buffer.

    ipyparallel makes one for stdout and one for stderr (its setting `out_stream_factory`).
    """

    def __init__(self, session: Any, pub_thread: Any, name: str, **options: Any) -> None:
        channel = getattr(pub_thread, "gpupool_channel", None)
        if channel is None:
            channel = pub_thread.gpupool_channel = Channel(session, pub_thread)
        self._channel: Channel = channel
        super().__init__(session, pub_thread, name, **options)  # type: ignore[no-untyped-call]
        self.write = self._writer()  # type: ignore[assignment, method-assign]
        _streams.append(self)
        keep_the_call_of_threads()

    def flush(self) -> None:
        """Send what was written, to both streams."""
        if not _forked and self.pub_thread is not None:
            self._channel.flush()

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
            """Take in text. In a forked child it goes the way of what C code writes."""
            if forked:
                _write_all(1 if name == "stdout" else 2, string.encode(errors="replace"))
                return len(string)
            try:
                call = this_call()
            except LookupError:  # a thread that was not told its call
                call = self.parent_header
            write(name, call, string)
            return len(string)

        return write_text

    def _watch_pipe_fd(self) -> None:
        """Take in what comes when nobody writes to the streams; a thread of ipykernel."""
        if self._fid is None:
            return
        self._channel.watch(self, self._fid)
        _buffer_lines_of_c()
        poll = select.poll()
        poll.register(self._fid, select.POLLIN)
        while self._should_watch and any(events & select.POLLIN for _, events in poll.poll()):
            self._channel.read()


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
