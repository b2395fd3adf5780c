"""What an engine publishes, in the order in which it was written. Runs on engines.

All text goes through one buffer, and everything else that the engine publishes (a figure, the end
of a call) takes the text before it along. Who writes more than is sent waits: so a rank that prints
without end fills no memory, here or on the way to the notebook.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from io import StringIO
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

from gpupool.core.wire.output import PIECES

INTERVAL_S = 0.1  # text waits that long for more
MAX_CHARS = 1 << 20  # in an interval; who writes more waits for the next one
NUM_FLUSHES = 40  # in a second that are done at once; others wait for the interval

_PIPE_BYTES = 1 << 20  # so that C code that holds the GIL does not wait for our reader so soon
_FLUSH_TIMEOUT_S = 10.0
_ROOM_TIMEOUT_S = 1.0  # for a signal's handler: what it has interrupted may hold the lock

Take = Callable[[bytes], tuple[str, dict[str, Any], str]]
"""What makes text of what was written to a descriptor: stream, call and text."""


class Piece(NamedTuple):
    """Text that was written to one stream during one call."""

    name: str
    parent: dict[str, Any]
    buffer: StringIO


class Channel:
    """What both streams have written and is not sent yet. Thread-safe."""

    def __init__(self, session: Any, pub_thread: Any) -> None:
        self._session = session
        self._thread = pub_thread
        self._lock = threading.RLock()  # a signal's handler may print too
        self._pieces: list[Piece] = []
        self._num_chars = 0
        self._has_room = threading.Event()
        self._timer_set = False
        self._flushed_at = deque[float](maxlen=NUM_FLUSHES)
        self._watched: dict[int, Take] = {}
        self._poll = select.poll()
        self.num_published = 0  # messages
        self._direct = SimpleNamespace(send_multipart=pub_thread._really_send)
        self._send_other = pub_thread.send_multipart
        pub_thread.send_multipart = self._send_in_order

    def write(self, name: str, parent: dict[str, Any], text: str) -> None:
        with self._lock:
            self._read_descriptors()
            self._append(name, parent, text)
        self._wait_for_room()

    def flush(self) -> None:
        """Send now, unless that was asked for very often lately; then it happens soon."""
        with self._lock:
            self._read_descriptors()
            if not self._pieces:
                return
            now, earlier = time.monotonic(), self._flushed_at
            if len(earlier) == NUM_FLUSHES and now - earlier[0] < 1.0:
                return  # the timer is set
            earlier.append(now)
            self._schedule_text()
        if not self._is_sending():
            sent = threading.Event()
            self._thread.schedule(sent.set)
            sent.wait(_FLUSH_TIMEOUT_S)

    def is_silent_since(self, num_published: int) -> bool:
        with self._lock:
            self._read_descriptors()
            return not self._pieces and self.num_published == num_published

    def watch(self, descriptor: int, take: Take) -> None:
        """Receive what comes out of this descriptor, until code closes it."""
        with contextlib.suppress(OSError):  # the system allows less
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with self._lock:
            self._watched[descriptor] = take
            self._poll.register(descriptor, select.POLLIN)
        comes = select.poll()
        comes.register(descriptor, select.POLLIN)
        while any(events & select.POLLIN for _, events in comes.poll()):
            with self._lock:
                self._read_descriptors()
            self._wait_for_room()

    # ---- inside --------------------------------------------------------------------------

    def _wait_for_room(self) -> None:
        if self._num_chars > MAX_CHARS and not self._is_sending():
            self._has_room.wait(_ROOM_TIMEOUT_S)

    def _is_sending(self) -> bool:
        """Whether this is the thread that sends, which waits for nothing."""
        return threading.current_thread() is self._thread.thread

    # with the lock held

    def _read_descriptors(self) -> None:
        for descriptor, events in self._poll.poll(0):
            if events & select.POLLIN:
                self._append(*self._watched[descriptor](os.read(descriptor, _PIPE_BYTES)))
            else:
                self._poll.unregister(descriptor)

    def _append(self, name: str, parent: dict[str, Any], text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is None or last.name != name or last.parent is not parent:
            last = Piece(name, parent, StringIO())
            self._pieces.append(last)
        last.buffer.write(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            self._has_room.clear()
        if not self._timer_set:
            loop = self._thread.io_loop
            self._thread.schedule(lambda: loop.call_later(INTERVAL_S, self._on_timer))
            self._timer_set = True  # last: an interrupt may come between

    def _schedule_text(self) -> None:
        pieces, self._pieces, self._num_chars = self._pieces, [], 0
        self._has_room.set()
        if pieces:
            self.num_published += 1
            self._thread.schedule(lambda: self._send_text(pieces))

    def _send_in_order(self, *args: Any, **options: Any) -> None:
        with self._lock:
            self._read_descriptors()
            self._schedule_text()
            self.num_published += 1
            self._send_other(*args, **options)

    # in the thread that sends

    def _on_timer(self) -> None:
        with self._lock:
            self._timer_set = False
            self._schedule_text()

    def _send_text(self, pieces: list[Piece]) -> None:
        self._session.pid = os.getpid()  # as ipykernel does: this thread survives no fork
        for _, same in groupby(pieces, lambda piece: piece.parent.get("msg_id")):
            first, *others = same
            texts = [encodable(piece.buffer.getvalue()) for piece in (first, *others)]
            self._session.send(
                self._direct,
                "stream",
                {"name": first.name, "text": "".join(texts)},
                first.parent,
                f"stream.{first.name}".encode(),
                metadata={PIECES: [len(text) for text in texts]},
            )


def leave_out_status(kernel: Any) -> None:
    """Leave out what the pool's client, which is calling now, does not need: ipykernel's "busy"
    before each call, and its "idle" after one that has published nothing, as the reply says. Each
    costs every process on its way half a millisecond. Other clients hear what they did."""

    def caller() -> str:
        return str(kernel.get_parent("shell")["header"]["session"])

    owner, channel = caller(), kernel.iopub_socket.gpupool_channel
    publish, apply = kernel._publish_status, kernel.do_apply
    began, is_silent = channel.num_published, False

    def do_apply(*args: Any) -> Any:
        nonlocal is_silent
        reply, buffers = apply(*args)
        is_silent = channel.is_silent_since(began) and caller() == owner
        return {**reply, "silent": is_silent}, buffers

    def publish_status(status: str, channel_name: str, parent: Any = None) -> None:
        nonlocal began, is_silent
        is_own = channel_name == "shell" and caller() == owner
        if is_own and status == "busy":
            began, is_silent = channel.num_published, False
        elif not (is_own and is_silent):
            publish(status, channel_name, parent)

    kernel.do_apply, kernel._publish_status = do_apply, publish_status


def encodable(text: str) -> str:
    """The text with halves of characters, which no message can hold, written as \\ud800."""
    return text.encode(errors="backslashreplace").decode()
