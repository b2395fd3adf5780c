"""What comes on the client's sockets: sent again, or not signed, it has no effect.

The messages are those of a real run. No other user can send any (`tests/security/`); a rank can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import zmq

from gpupool import Pool
from gpupool.core.wire.requests import Counts

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


def test_the_client_goes_on_after_them(pool2: Pool, caplog: pytest.LogCaptureFixture) -> None:
    client: Any = pool2.engines._client
    inner, heard = client._client, list[list[bytes]]()

    def taker(handle: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(frames: Any) -> None:
            heard.append([bytes(frame.buffer) for frame in frames])
            handle(frames)

        return take

    callbacks = {name: getattr(inner, name)._recv_callback for name in STREAMS}
    for name, callback in callbacks.items():
        getattr(inner, name).on_recv(taker(callback), copy=False)
    before = pool2.run(RUN)
    pool2.engines.control(Counts(), [0])[0].result(60)
    for name, callback in callbacks.items():
        getattr(inner, name).on_recv(callback, copy=False)
    inner.num_dropped = 0  # by tests before
    for frames in list(heard):  # sent again, unsigned, as they were, on every socket
        unsigned = list(frames)
        unsigned[frames.index(MARK) + 1] = b""
        for handler in HANDLERS:
            num_dropped = inner.num_dropped
            for sent in (frames, unsigned):
                getattr(inner, handler)([zmq.Message(frame) for frame in sent])
            assert inner.num_dropped == num_dropped + 2
    again = pool2.run(RUN)
    assert (dict(again), again.text(0), again.text(1)) == (
        dict(before),
        before.text(0),
        before.text(1),
    )
    assert client.ranks == [0, 1]
    assert [record.message for record in caplog.records].count(DROPPED) == 1
