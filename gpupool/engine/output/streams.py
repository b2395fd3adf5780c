"""stdout and stderr of an engine. Runs on engines.

ipykernel gives each stream a buffer of its own, which loses their order, and reads what C code and
child processes write to descriptors 1 and 2 in its own time. Here both write to one channel. What
comes from the descriptors goes into the log too, which is a file: secrets are masked there.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import logging
import os
import sys
from typing import Any

import tqdm
from ipykernel.iostream import OutStream
from jupyter_client.session import extract_header

from gpupool.core.wire.masking import Redactor, Secrets, redact
from gpupool.engine.output.channel import Channel
from gpupool.engine.shell import this_shell

secrets = Secrets()  # masked in the log


class OrderedStream(OutStream):
    """ipykernel's stream, with the channel in the place of its buffer.

    ipyparallel makes one for stdout and one for stderr (its setting `out_stream_factory`). It has
    what a text stream of a script has (`buffer`, `reconfigure`), and is never closed.
    """

    errors = "strict"

    def __init__(self, session: Any, pub_thread: Any, name: str, **options: Any) -> None:
        channel = getattr(pub_thread, "gpupool_channel", None)
        if channel is None:
            channel = pub_thread.gpupool_channel = Channel(session, pub_thread)
        self._channel: Channel = channel
        self._descriptor = {"stdout": 1, "stderr": 2}[name]
        # a read may end within a character
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._redactor = Redactor(secrets)
        super().__init__(session, pub_thread, name, **options)  # type: ignore[no-untyped-call]
        self.buffer = _Octets(self._descriptor, "wb", closefd=False)
        underlying = getattr(sys, f"__{name}__")
        underlying.reconfigure(line_buffering=True)  # it is shown too: in its place
        _streams[name] = self

    def write(self, string: str) -> int:
        """Receive text. In a forked child it goes the way of what C code writes."""
        if self._is_master_process():  # type: ignore[no-untyped-call]
            self._channel.write(self.name, self.parent_header, string)
        else:
            os.write(self._descriptor, string.encode(errors="replace"))
        return len(string)

    def flush(self) -> None:
        if self._is_master_process():  # type: ignore[no-untyped-call]
            self._channel.flush()

    def close(self) -> None:
        """Flush: what comes next has to be shown too."""
        self.flush()

    def fileno(self) -> int:
        """The descriptor whose text is shown, for child processes. ipykernel gives the log's."""
        return self._descriptor

    def reconfigure(self, **settings: object) -> None:
        """Take what a script asks of its output, of which nothing makes a difference here."""

    def _take(self, octets: bytes) -> tuple[str, dict[str, Any], str]:
        text = self._decode(octets)
        with contextlib.suppress(OSError):
            os.write(self._original_stdstream_copy, self._redactor.feed(text).encode())
        return self.name, self._parent_header_global, text

    def _watch_pipe_fd(self) -> None:
        """A thread of ipykernel."""
        if self._fid is not None:
            with contextlib.suppress(ValueError, AttributeError):
                _give_out_lines_of_c()
            self._channel.watch(self._fid, self._take)


class _Octets(io.FileIO):
    """`sys.stdout.buffer`, by the way of what C code writes. A wrapper that goes closes it."""

    def close(self) -> None:
        pass


def follow_call(parent: dict[str, Any]) -> None:
    """What is written belongs to this call; also what threads, child processes and C code write
    later, until the next that is shown."""
    global _shown
    _shown = extract_header(parent)
    for own in _streams.values():
        own.parent_header = _shown


def show_nothing() -> None:
    """The call that runs is the pool's own: what others write still belongs to the one before."""
    for publisher in (*_streams.values(), this_shell().display_pub):
        publisher._parent_header_global = _shown


def restore_streams() -> None:
    """Let `sys.stdout` and `sys.stderr` be streams that work; says what did not, and why."""
    for name, own in _streams.items():
        present: Any = getattr(sys, name, None)
        try:
            if present is not own:
                present.flush()
        except BaseException as error:  # code of the user's, which an interrupt may end
            setattr(sys, name, own)
            _streams["stderr"].write(
                f"sys.{name} could not be flushed ({type(error).__name__}: {error}). What is "
                "written is shown here again.\n"
            )


def mask_log(logger: logging.Logger) -> None:
    """Mask what the kernel itself logs. Once, before there are secrets."""
    for handler in logger.handlers:
        handler.setFormatter(_Masking())


class _Masking(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), secrets)


def draw_as_in_a_terminal() -> None:
    """Have libraries draw bars as in a terminal: a rank's widgets are not in the notebook."""
    from ipykernel.ipkernel import IPythonKernel  # not before `boot` has left the debugger out
    from ipykernel.zmqshell import ZMQInteractiveShell

    tqdm.std.tqdm_notebook, tqdm.std.tnrange = tqdm.std.tqdm, tqdm.std.trange
    for name in ("notebook", "autonotebook"):
        setattr(tqdm, name, tqdm.std)
        sys.modules[f"tqdm.{name}"] = tqdm.std
    # rich goes by the name of the shell's class
    kernel: Any = IPythonKernel
    kernel.shell_class = type("RankShell", (ZMQInteractiveShell,), {})
    os.environ.setdefault("TTY_COMPATIBLE", "1")


_streams: dict[str, OrderedStream] = {}
_shown: dict[str, Any] = {}  # the last call that showed its output


def _give_out_lines_of_c() -> None:
    """Let C's stdout give out whole lines: into a pipe it would keep 4 KiB back."""
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
