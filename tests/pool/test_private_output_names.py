"""What the ranks' output relies on in ipyparallel, ipykernel and IPython that they do not promise.

One test for each private name, or unwritten fact; it names the file that has to change.
"""

from __future__ import annotations

import inspect
from typing import Any

import tqdm.std
from ipykernel.iostream import IOPubThread, OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher
from ipyparallel import Client
from ipyparallel.controller import hub
from ipyparallel.controller.app import IPController
from ipyparallel.engine.app import IPEngine
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from gpupool import Pool
from gpupool.pool.engines.client import plain_client
from tests.support.processes import folder_of, until


def test_a_client_hears_what_is_published_in_one_method_and_waits_for_output_futures() -> None:
    """`_dispatch_iopub` and `_output_futures`, in pool/engines/client.py."""
    assert "on_recv(self._dispatch_iopub" in inspect.getsource(Client._setup_streams)
    source = inspect.getsource(Client.create_message_futures)
    assert "self._output_futures[msg_id] = output" in source


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


def test_an_engine_makes_its_streams_with_the_class_it_is_given(pool2: Pool) -> None:
    """`IPEngine.out_stream_factory`, in engine/boot.py."""
    assert "self.out_stream_factory(" in inspect.getsource(IPEngine.redirect_output)
    assert pool2.run("import sys\ntype(sys.stderr).__name__")[1] == "OrderedStream"


def test_all_an_engine_publishes_goes_through_one_method_of_its_thread(pool2: Pool) -> None:
    """`IOPubThread.send_multipart`, `_really_send`, `schedule` and `io_loop`, in channel.py."""
    assert "_really_send" in inspect.getsource(IOPubThread.send_multipart)
    assert "self._events.append(f)" in inspect.getsource(IOPubThread.schedule)
    code = (
        "kernel = get_ipython().kernel\nimport sys\n"
        "kernel.iopub_socket is sys.stdout.pub_thread, "
        "get_ipython().display_pub.pub_socket is sys.stdout.pub_thread"
    )
    assert pool2.run(code)[0] == (True, True)


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


def test_tqdm_chooses_its_bars_in_one_module_and_draws_those_of_the_ranks_as_text(
    pool2: Pool,
) -> None:
    """`tqdm.autonotebook`, in engine/output/streams.py."""
    said = pool2.run("import tqdm.auto, tqdm.notebook\ntqdm.auto.tqdm.__mro__, tqdm.notebook.tqdm")
    assert tqdm.std.tqdm in said[0][0]
    assert said[0][1] is tqdm.std.tqdm
    drawn = pool2.run("for _ in tqdm.auto.tqdm(range(4)): pass")
    assert drawn.text(1).startswith("100%|██████████| 4/4 [")


def test_ipython_notes_all_output_and_can_be_kept_from_it() -> None:
    """`InteractiveShell._tee` and `history_manager.outputs`, in engine/shell/shell.py."""
    assert 'self._tee(channel="stdout")' in inspect.getsource(InteractiveShell.run_cell)
    assert "self.outputs" in inspect.getsource(HistoryManager)
    assert callable(DisplayPublisher.publish)


def test_ipython_puts_a_value_into_out_by_a_method_and_knows_the_number_of_the_cell() -> None:
    """Private: `update_user_ns`, `prompt_count`, `semicolon_at_end_of_expression`, in views.py."""
    source = inspect.getsource(DisplayHook)
    for name in ("def update_user_ns(self, result)", "prompt_count"):
        assert name in source
    assert DisplayHook.semicolon_at_end_of_expression("x;")
