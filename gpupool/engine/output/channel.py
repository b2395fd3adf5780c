"""What an engine publishes, in order and bounded. Runs on engines.

All text goes through one buffer in the order in which it was written, and everything else that the
engine publishes (a figure, the end of a call) takes the text before it along. A rank that prints
without end is held up by nothing and floods nobody: its first and its last megabytes arrive whole.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Iterable
from io import StringIO
from typing import Any, Protocol

from gpupool.core.wire.events import PIECES

INTERVAL_S = 0.1  # text waits that long for more
NUM_FLUSHES = 40  # in a second that are done at once; others wait for the interval
FREE_CHARS = 8 << 20  # of each call that are sent as they come
RATE_CHARS = 1 << 19  # in each interval after that
MAX_CHARS = 8 << 20  # waiting to be sent; beyond, those between the first and the last are dropped
KEPT_HEAD_CHARS, KEPT_LAST_CHARS = 4096, 3 << 20
MAX_MESSAGES = 8  # for text that alternates between the streams; more go as one

_PIPE_BYTES = 1 << 20  # so that C code that holds the GIL does not wait for our reader so soon
_READ_BYTES = 1 << 16
_MAX_READS = 32  # in a row: a child that writes without end must not keep others from writing
_FLUSH_TIMEOUT_S = 10.0


class Source(Protocol):
    """A stream that is also written to by its descriptor."""

    name: str

    def latest_parent(self) -> dict[str, Any]:
        """The call that runs, or that ran last."""

    def echo_octets(self, octets: bytes) -> None:
        """Put what was written to the descriptor into the log as well."""


class Piece:
    """Text that was written to one stream during one call."""

    __slots__ = ("buffer", "name", "parent", "write")

    def __init__(self, name: str, parent: dict[str, Any], text: str = "") -> None:
        self.name, self.parent = name, parent
        self.buffer = StringIO()
        self.write = self.buffer.write
        self.write(text)

    @property
    def text(self) -> str:
        """What was written."""
        return self.buffer.getvalue()


class Channel:
    """What both streams have written and is not sent yet. Thread-safe."""

    def __init__(self, session: Any, pub_thread: Any) -> None:
        self._session = session
        self._thread = pub_thread
        self._lock = threading.RLock()  # a signal's handler may print too
        self._pieces: list[Piece] = []
        self._num_chars = 0
        self._timer_set = False
        self._flushes, self._flushes_since = 0, 0.0
        self._call, self._num_sent = "", 0
        self._readers: dict[int, Source] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # a read may end in a character
        self._poll = select.poll()
        self.num_published = 0  # messages
        self._send_other = pub_thread.send_multipart
        pub_thread.send_multipart = self._send_in_order

    def write(self, name: str, parent: dict[str, Any], text: str) -> None:
        """Receive text; what was written to the descriptors before it goes first."""
        with self._lock:
            if self._poll.poll(0):
                self._read_descriptors()
            last = self._last
            if last is None or last.parent is not parent or last.name != name:
                self._append(name, parent, text)
                return
            last.write(text)  # every print comes here: no call more than needed
            self._num_chars += len(text)
            if self._num_chars > MAX_CHARS:
                self._thin_out()

    def flush(self) -> None:
        """Send now, unless that was asked for very often lately; then it happens soon."""
        with self._lock:
            self._read_descriptors()
            if not self._pieces:
                return
            now = time.monotonic()
            if now - self._flushes_since > 1.0:
                self._flushes, self._flushes_since = 0, now
            self._flushes += 1
            if self._flushes > NUM_FLUSHES:
                return  # the timer is set
            self._schedule(self._take())
        if threading.current_thread() is self._thread.thread:
            return
        sent = threading.Event()
        self._thread.schedule(sent.set)
        sent.wait(_FLUSH_TIMEOUT_S)

    def is_silent_since(self, num_published: int) -> bool:
        """Whether nothing was published since it was that many messages, nor is about to be."""
        with self._lock:
            self._read_descriptors()
            return not self._pieces and self.num_published == num_published

    def watch(self, stream: Source, descriptor: int) -> None:
        """Read what comes out of this descriptor as text of the stream."""
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the system allows less
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with self._lock:
            self._readers[descriptor] = stream
            self._decoders[descriptor] = codecs.getincrementaldecoder("utf-8")("replace")
            self._poll.register(descriptor, select.POLLIN)

    def read(self) -> None:
        """Receive what was written to the descriptors."""
        with self._lock:
            self._read_descriptors()

    # ---- inside, with the lock held ------------------------------------------------------

    def _read_descriptors(self) -> None:
        for descriptor, events in self._poll.poll(0):
            stream = self._readers[descriptor]
            if not events & select.POLLIN:  # closed by whoever wrote to it
                self._poll.unregister(descriptor)
            for _ in range(_MAX_READS if events & select.POLLIN else 0):
                try:
                    octets = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not octets:
                    break
                stream.echo_octets(octets)
                # written by code that knows nothing of calls: it belongs to the running one
                text = self._decoders[descriptor].decode(octets)
                self._append(stream.name, stream.latest_parent(), text)

    def _append(self, name: str, parent: dict[str, Any], text: str) -> None:
        last = self._last
        if last is None or last.name != name or not _same_call(last.parent, parent):
            self._pieces.append(Piece(name, parent, text))
        else:
            last.write(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            self._thin_out()
        if not self._timer_set:
            self._set_timer()

    @property
    def _last(self) -> Piece | None:
        return self._pieces[-1] if self._pieces else None

    def _take(self, max_chars: int | None = None) -> list[Piece]:
        """The pieces to send now; of one that is cut by the limit the rest stays."""
        pieces, self._pieces, self._num_chars = self._pieces, [], 0
        taken: list[Piece] = []
        for n, piece in enumerate(pieces):
            text = piece.text
            if max_chars is not None and len(text) > max_chars:
                cut = text.rfind("\n", 0, max_chars) + 1 or max_chars
                rest = Piece(piece.name, piece.parent, text[cut:])
                self._pieces = [rest, *pieces[n + 1 :]]
                self._num_chars = _num_chars(self._pieces)
                return [*taken, Piece(piece.name, piece.parent, text[:cut])]
            taken.append(piece)
            max_chars = max_chars and max_chars - len(text)
        return taken

    def _schedule(self, pieces: list[Piece]) -> None:
        if pieces:
            self.num_published += 1
            self._thread.schedule(lambda: self._emit(pieces))

    def _set_timer(self) -> None:
        self._timer_set = True
        loop = self._thread.io_loop
        self._thread.schedule(lambda: loop.call_later(INTERVAL_S, self._on_timer))

    def _on_timer(self) -> None:
        """Send what waits; called in the thread that sends."""
        with self._lock:
            self._timer_set = False
            if not self._pieces:
                return
            call = self._pieces[0].parent.get("msg_id", "")
            if call != self._call:
                self._call, self._num_sent = call, 0
            limit = None if self._num_sent < FREE_CHARS else RATE_CHARS
            waiting = self._num_chars
            self._schedule(self._take(limit))
            self._num_sent += waiting - self._num_chars
            if self._pieces:
                self._set_timer()

    def _send_in_order(self, *args: Any, **options: Any) -> None:
        """Send another message, after the text that was written before it."""
        with self._lock:
            self._read_descriptors()
            self._schedule(self._take())
            self.num_published += 1
            self._send_other(*args, **options)

    def _thin_out(self) -> None:
        """Drop what lies between the first and the last lines of what waits.

        Whole lines only: who masks what is left would not find half of a secret.
        """
        first, last, left = self._pieces[0], list[Piece](), KEPT_LAST_CHARS
        for piece in reversed(self._pieces):
            text = piece.text
            if len(text) > left:
                start = text.find("\n", len(text) - left) + 1 or len(text)
                last.insert(0, Piece(piece.name, piece.parent, text[start:]))
                break
            left -= len(text)
            last.insert(0, piece)
        head = first.text[: first.text.rfind("\n", 0, KEPT_HEAD_CHARS) + 1]
        note = left_out(self._num_chars - _num_chars(last) - len(head))
        self._pieces = [Piece(first.name, first.parent, head + note), *last]
        self._num_chars = _num_chars(self._pieces)

    # ---- in the thread that sends --------------------------------------------------------

    def _emit(self, pieces: list[Piece]) -> None:
        self._session.pid = os.getpid()  # as ipykernel does: this thread survives no fork
        start = 0
        while start < len(pieces):
            end = start + 1
            while end < len(pieces) and _same_call(pieces[end].parent, pieces[start].parent):
                end += 1
            self._emit_of_call(pieces[start:end])
            start = end

    def _emit_of_call(self, pieces: list[Piece]) -> None:
        texts = [encodable(piece.text) for piece in pieces]
        if len(pieces) <= MAX_MESSAGES:
            for piece, text in zip(pieces, texts, strict=True):
                self._send(piece, text, {})
            return
        self._send(pieces[0], "".join(texts), {PIECES: [len(text) for text in texts]})

    def _send(self, piece: Piece, text: str, metadata: dict[str, Any]) -> None:
        topic = f"stream.{piece.name}".encode()
        content = {"name": piece.name, "text": text}
        self._session.send(
            _Direct(self._thread), "stream", content, piece.parent, topic, metadata=metadata
        )


def encodable(text: str) -> str:
    """The text with halves of characters, which no message can hold, written as \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def left_out(num_chars: int) -> str:
    """The line that stands for text that was printed faster than it can be sent."""
    return f"\n[... {num_chars} characters left out: printed faster than they can be sent ...]\n"


class _Direct:
    """For `Session.send`: sends in this thread, which is the one that may."""

    def __init__(self, pub_thread: Any) -> None:
        self.send_multipart = pub_thread._really_send


def _same_call(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one is other or one.get("msg_id") == other.get("msg_id")


def _num_chars(pieces: Iterable[Piece]) -> int:
    return sum(piece.buffer.tell() for piece in pieces)
