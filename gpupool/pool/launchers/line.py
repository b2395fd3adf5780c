"""The line to a starter: commands go to its stdin, events come from its stdout. On the client."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from gpupool.core.wire import starter as lines

_END_S = 5.0  # for a starter to end all it has started
_MOST_BYTES, _TAIL_LINES = 1 << 20, 20  # of what it says on stderr


class Line:
    """A running starter, or what stands before its line on another host: ssh, srun.

    It is heard from `listen` on.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._on_event: Callable[[lines.Line], None] = lambda event: None
        self.preloaded = threading.Event()  # it has imported what it needs
        self._client_pid = os.getpid()
        self._stderr = os.memfd_create("gpupool-starter")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            start_new_session=True,  # the notebook's interrupt is not meant for it
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self._write_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="gpupool-starter", daemon=True)

    def listen(self, on_event: Callable[[lines.Line], None]) -> None:
        """Call `on_event` from a background thread with each event from now on.

        The last one is the end of the starter itself, which may have come before.
        """
        self._on_event = on_event
        if self._reader.ident is None:
            self._reader.start()

    @property
    def is_there(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it; a child that the notebook forks has no say."""
        return os.getpid() == self._client_pid

    def command(self, command: lines.Line) -> None:
        """Send one command. An event reports a dead starter; here nobody is left to hear."""
        with self._write_lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._pipe.write(lines.encode(command))
            self._pipe.flush()

    def kill(self) -> None:
        """End it without a word; it is reported as an end."""
        self._process.kill()

    def close(self) -> None:
        """End it, and with it all it has started, also if it does not react."""
        if not self.is_ours:
            return
        with self._write_lock, contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        if self.preloaded.is_set():  # else it would not hear it soon
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._process.kill()  # its children die with it; no effect when it has ended
        self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(_END_S)  # it ends what is left

    def _ended(self) -> None:
        """It has ended; in the reader's thread, before who listens hears it."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                event = lines.decode(line)
                if isinstance(event, lines.Ready):
                    self.preloaded.set()
                if event is not None:
                    self._on_event(event)
        status = self._process.wait()
        said = os.pread(self._stderr, _MOST_BYTES, 0).decode(errors="replace")
        os.close(self._stderr)
        self._ended()
        tail = "\n".join(said.splitlines()[-_TAIL_LINES:])
        self._on_event(lines.Exited(lines.STARTER, status, "", tail))
