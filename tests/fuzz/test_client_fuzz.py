"""What comes on the client's sockets: damaged, sent again or of strange shape, it has no effect.

The messages are those of a real run. No other user can send any (`tests/security/`); a rank can.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from gpupool import Pool
from gpupool.core.wire.calls import RunSource
from gpupool.core.wire.requests import Counts
from gpupool.pool.processes.client import EngineClient
from tests.fuzz.limits import fuzzed, only_our_errors
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
        self.real: tuple[Frames, ...] = ()
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

    def sign(self, frames: Frames) -> Frames:
        """The same with a signature that is right, as of a rank."""
        where = frames.index(MARK) + 1
        frames[where] = self.inner.session.sign(frames[where + 1 : where + 5])
        return frames


@pytest.fixture
def tapped(pool2: Pool) -> Iterator[Tapped]:
    file = folder_of(pool2) / "profile" / "security" / "ipcontroller-client.json"
    client = EngineClient(file, timeout_s=60)
    until(lambda: client.ranks == [0, 1], 5)
    until(lambda: hears(client), 60)
    tapped = Tapped(client)
    tapped.run()
    tapped.client.control(0, Counts()).result(timeout=60)
    tapped.real = tuple(tapped.heard)  # more may come at any time
    yield tapped
    client.close()


def hears(client: EngineClient) -> bool:
    """Whether a call ends: what ranks say before a new client has subscribed is lost."""
    with contextlib.suppress(TimeoutError):
        client.call(0, RunSource("pass", None)).result(timeout=2)
        return True
    return False


def damaged(data: st.DataObject, frames: Frames) -> Frames:
    """With one frame cut, changed, doubled, missing or in another's place."""
    where, other = (data.draw(st.integers(0, len(frames) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["drop", "cut", "flip", "insert", "large", "swap"])):
        case "drop":
            del frames[where]
        case "cut":
            frames[where] = frames[where][: data.draw(st.integers(0, len(frames[where])))]
        case "flip":
            frames[where] = bytes(255 - byte for byte in frames[where])
        case "insert":
            frames.insert(where, data.draw(st.binary(max_size=50)))
        case "large":
            frames[where] = b"[" * 1_000_000
        case "swap":
            frames[where], frames[other] = frames[other], frames[where]
    return frames


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


def strange(data: st.DataObject, frames: Frames) -> Frames:
    """One of header, parent, metadata and content, or a part of it, is something else."""
    where = frames.index(MARK) + 2 + data.draw(st.integers(0, 3))
    value = json.loads(frames[where])
    for key in data.draw(st.sets(st.sampled_from(sorted(value)))) if value else ():
        value[key] = data.draw(VALUES)
    frames[where] = json.dumps(data.draw(st.sampled_from([value]) | VALUES)).encode()
    return frames


@fuzzed
@given(data=st.data())
def test_messages_that_are_damaged_or_strange_have_no_effect(
    tapped: Tapped, data: st.DataObject
) -> None:
    frames = list(data.draw(st.sampled_from(tapped.real)))
    change = data.draw(st.sampled_from([damaged, strange]))
    frames = change(data, frames)
    if data.draw(st.booleans()) and MARK in frames[:-1]:
        frames = tapped.sign(frames)
    with only_our_errors():
        tapped.receive(data.draw(st.sampled_from(HANDLERS)), frames)


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
