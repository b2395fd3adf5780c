"""What comes on the client's sockets: sent again, or not signed, it has no effect.

The messages are those of a real run. No other user can send any (`tests/security/`); a rank can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from gpupool import Pool
from gpupool.core.wire.calls import RunSource
from gpupool.core.wire.requests import Counts
from gpupool.pool.engines.client import EngineClient
from tests.support.processes import folder_of, until

Frames = list[bytes]
MARK = b"<IDS|MSG>"
DROPPED = "a message to the pool was dropped, as it is not signed or not whole; more are counted"
RUN = """
import sys
from IPython.display import display, HTML
print("text"); print("error", file=sys.stderr); display(HTML("<b>x</b>"))
[1, 2]
"""
HANDLERS = (
    "_dispatch_reply",
    "_dispatch_single_reply",
    "_dispatch_notification",
    "_dispatch_iopub",
)
STREAMS = ("_mux_stream", "_control_stream", "_notification_stream", "_iopub_stream")


class Tapped:
    """A second client of a pool, and the frames that have come on its sockets."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.inner = client._client
        self.heard: list[Frames] = []
        for stream in STREAMS:
            socket = getattr(self.inner, stream)
            socket.on_recv(self._taker(socket._recv_callback), copy=False)

    def _taker(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(frames: Any) -> None:
            self.heard.append([bytes(frame.buffer) for frame in frames])
            handle(frames)

        return take

    def run(self) -> Any:
        call = RunSource(RUN, None)
        heard: list[Any] = []
        take = self.client.call(0, call, lambda *piece: heard.append(piece))
        value = take.result(timeout=60).value
        return value.text, value.packed, heard

    def receive(self, handler: str, frames: Frames) -> None:
        getattr(self.inner, handler)([zmq.Message(frame) for frame in frames])


@pytest.fixture
def tapped(pool2: Pool) -> Iterator[Tapped]:
    file = folder_of(pool2) / "profile" / "security" / "ipcontroller-client.json"
    client = EngineClient(file, timeout_s=60)
    until(lambda: client.ranks == [0, 1], 5)
    until(lambda: hears(client), 60)
    tapped = Tapped(client)
    tapped.run()
    tapped.client.control(0, Counts()).result(timeout=60)
    yield tapped
    client.close()


def hears(client: EngineClient) -> bool:
    """Whether a call ends: what ranks say before a new client has subscribed is lost."""
    with contextlib.suppress(TimeoutError):
        client.call(0, RunSource("pass", None)).result(timeout=2)
        return True
    return False


def test_the_client_goes_on_after_them(tapped: Tapped, caplog: pytest.LogCaptureFixture) -> None:
    before = tapped.run()
    for frames in list(tapped.heard):  # sent again, unsigned, as they were, on every socket
        unsigned = list(frames)
        unsigned[frames.index(MARK) + 1] = b""
        for handler in HANDLERS:
            num_dropped = tapped.client.num_dropped
            tapped.receive(handler, frames)
            tapped.receive(handler, unsigned)
            assert tapped.client.num_dropped == num_dropped + 2
    assert tapped.run() == before
    assert tapped.client.ranks == [0, 1]
    assert [record.message for record in caplog.records].count(DROPPED) == 1
