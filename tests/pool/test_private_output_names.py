"""What the ranks' output relies on in ipyparallel, ipykernel and IPython that they do not promise.

One test for each private name, or unwritten fact; it names the file that has to change.
"""

from __future__ import annotations

import inspect
from typing import Any

from ipykernel.iostream import IOPubThread, OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher
from ipyparallel.controller import hub
from ipyparallel.controller.app import IPController
from IPython.core.displayhook import DisplayHook

from gpupool import Pool
from gpupool.pool.engines.client import plain_client
from tests.support.processes import folder_of, until


def test_a_call_is_followed_by_idle_only_if_it_has_published_something(pool2: Pool) -> None:
    """`_publish_status`, Private names of engine/output/status.py and pool/engines/client.py."""
    client: Any = plain_client(
        folder_of(pool2) / "profile" / "security" / "ipcontroller-client.json"
    )
    heard: list[str] = []

    def hear(frames: Any) -> None:
        message = client.session.deserialize(client.session.feed_identities(frames)[1])
        parent, content = message["parent_header"], message["content"]
        if (
            parent["session"] != client.session.session
            and parent["msg_type"] == "apply_request"  # not what watches over the call
        ):
            heard.append(
                content.get("execution_state") or content.get("text") or message["msg_type"]
            )

    client._io_loop.add_callback(client._iopub_stream.on_recv, hear)
    shown = "import os\nos.write(1, b'octets\\n')\n6 * 7"
    for cell in ("x = 1", "1 / 0", "print('printed')", shown, "print('end')"):
        pool2.begin(cell, ranks=(0,), on_output=lambda *_: None).wait(60.0)
    until(lambda: heard[-2:] == ["end\n", "idle"], 20.0)
    client.close(linger=0)
    assert heard[:-2] == ["printed\n", "idle", "octets\n", "execute_result", "idle"]


def test_the_controller_follows_calls_without_reading_what_they_publish(pool2: Pool) -> None:
    """`hub.monitor`, `monitor_handlers` and `extract_dates`, in host/controller.py."""
    assert 'setsockopt(zmq.SUBSCRIBE, b"")' in inspect.getsource(IPController.init_hub)
    assert "b'iopub': self.monitor_iopub_message" in inspect.getsource(hub.Hub)
    assert callable(hub.extract_dates)
    asked = pool2.client[0].apply_async(lambda: 42)
    assert asked.get(20.0) == 42
    until(lambda: asked.msg_ids[0] in pool2.client.queue_status([0], True)[0]["completed"], 20.0)


def test_all_an_engine_publishes_goes_through_one_method_of_its_thread() -> None:
    """`IOPubThread.send_multipart`, `_really_send`, `schedule` and `io_loop`, in channel.py."""
    assert "_really_send" in inspect.getsource(IOPubThread.send_multipart)
    assert "self._events.append(f)" in inspect.getsource(IOPubThread.schedule)


def test_a_stream_knows_its_call_by_context_and_at_large() -> None:
    """`_parent_header_global`, `_is_master_process`, in engine/output/streams.py."""
    for kind in (OutStream, ZMQDisplayPublisher):
        source = inspect.getsource(kind)
        for name in ("self._parent_header.get()", "return self._parent_header_global"):
            assert name in source
    assert callable(OutStream._is_master_process)


def test_a_stream_reads_its_descriptor_in_a_method_of_its_own() -> None:
    """`_watch_pipe_fd`, `_fid`, `_original_stdstream_copy`, in streams.py."""
    source = inspect.getsource(OutStream)
    assert "threading.Thread(target=self._watch_pipe_fd)" in source
    for name in ("self._fid = pr", "self._original_stdstream_copy ="):
        assert name in source


def test_ipython_puts_a_value_into_out_by_a_method_and_knows_the_number_of_the_cell() -> None:
    """Private: `update_user_ns`, `prompt_count`, `semicolon_at_end_of_expression`, in views.py."""
    source = inspect.getsource(DisplayHook)
    for name in ("def update_user_ns(self, result)", "prompt_count"):
        assert name in source
    assert DisplayHook.semicolon_at_end_of_expression("x;")
