"""Messages of any shape arrive on the client's socket: all but those of ours are dropped."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import Pool
from gpupool.core.wire.events import PIECES
from gpupool.core.wire.masking import Secrets
from gpupool.pool.calls.output import OutputRecorder
from gpupool.pool.processes.iopub import Router
from tests.fuzz.limits import fuzzed, only_our_errors

# Of each kind one, as it came from a rank; `test_these_are_what_ranks_send` compares.
CONTENTS: dict[str, dict[str, Any]] = {
    "stream": {"name": "stdout", "text": "said\n"},
    "display_data": {
        "data": {"text/plain": "'shown'", "text/html": "<b>x</b>"},
        "metadata": {"text/html": {"isolated": True}},
        "transient": {"display_id": "a"},
    },
    "execute_result": {
        "execution_count": 1,
        "data": {"text/plain": "42"},
        "metadata": {},
    },
    "update_display_data": {
        "data": {"text/plain": "'again'"},
        "metadata": {},
        "transient": {"display_id": "a"},
    },
    "clear_output": {"wait": True},
    "data_message": {},
    "comm_open": {"comm_id": "c", "target_name": "jupyter.widget", "data": {"state": {}}},
    "comm_msg": {"comm_id": "c", "data": {"method": "update", "state": {"value": 3}}},
    "comm_close": {"comm_id": "c", "data": {}},
}
SHOWS_ALL = """
import sys
from IPython.display import clear_output, display
import ipywidgets
print("said"); print("wrong", file=sys.stderr)
clear_output(wait=True)
handle = display("shown", display_id="a"); handle.update("again")
bar = ipywidgets.IntProgress(); bar.value = 3; bar.close()
42
"""

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def message_of(kind: str) -> dict[str, Any]:
    events = {"events": [{"kind": "step", "step": 1}]}
    return {
        "header": {"msg_type": kind, "msg_id": "m"},
        "parent_header": {"msg_id": "call", "session": "s"},
        "metadata": {"engine": "e0", PIECES: [2, 3]} if kind == "stream" else {},
        "content": copy.deepcopy(CONTENTS[kind]),
        "buffers": [memoryview(pickle.dumps(events))] if kind == "data_message" else [],
    }


def read(buffers: Any) -> Any:
    """As `pool/processes/client.py` does with what ranks have published as data."""
    return pickle.loads(buffers[0])


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A real message of which up to three parts, at any depth, are missing or something else."""
    message: Any = message_of(draw(st.sampled_from(sorted(CONTENTS))))
    for _ in range(draw(st.integers(1, 3))):
        place = message
        while True:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.booleans()):
                del place[key]
            else:
                place[key] = draw(plain)
            break
    return message


def heard_by(router: Router) -> OutputRecorder:
    recorder = OutputRecorder((0,), Secrets(["secret"]))
    router.listen("call", lambda kind, content: recorder(0, kind, content))
    return recorder


@pytest.mark.parametrize("kind", CONTENTS)
def test_messages_as_ranks_send_them_are_not_dropped(kind: str) -> None:
    router, heard = Router(), list[str]()
    router.listen("call", lambda kind, content: heard.append(kind))
    router.route(message_of("comm_open"), read)
    router.route(message_of(kind), read)
    assert len(heard) >= 2
    assert router.num_dropped == 0


@fuzzed
@given(st.lists(damaged() | plain, max_size=4))
def test_what_has_another_shape_is_dropped_and_counted(
    caplog: pytest.LogCaptureFixture, messages: list[Any]
) -> None:
    router = Router()
    recorder = heard_by(router)
    caplog.clear()
    with only_our_errors():
        for message in messages:
            router.route(message, read)
        before = router.num_dropped
        router.route({"header": {}}, read)
        router.route(message_of("stream"), read)
        recorder.finish()
    assert router.num_dropped == before + 1
    assert len([1 for record in caplog.records if "was dropped" in record.message]) == 1
    # a listener is never given what it cannot take in
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    output = recorder.outputs[0]
    assert sorted(output.text[-5:]) == sorted("said\n")  # of two streams, in two pieces
    assert all(isinstance(bundle["data"], dict) for bundle in output.displays)


def test_what_ranks_send_has_the_shape_that_is_expected(pool2: Pool) -> None:
    heard: list[tuple[str, Any]] = []
    router = pool2._all_ranks.engines._client._router  # type: ignore[attr-defined]
    before = router.num_dropped
    pool2.begin(
        SHOWS_ALL, ranks=[0], on_output=lambda rank, kind, content: heard.append((kind, content))
    ).result()
    assert router.num_dropped == before
    kinds = {kind for kind, _ in heard}
    assert kinds >= {"stdout", "stderr", "clear", "display", "update", "comm", "result"}
    comms = {content["type"] for kind, content in heard if kind == "comm"}
    assert comms >= {"comm_open", "comm_msg", "comm_close"}


def test_what_a_cell_publishes_in_a_shape_of_its_own_costs_nothing(pool2: Pool) -> None:
    router = pool2._all_ranks.engines._client._router  # type: ignore[attr-defined]
    before = router.num_dropped
    kernel = "get_ipython().kernel"
    said = pool2.run(
        f"session, socket = {kernel}.session, {kernel}.iopub_socket\n"
        f"parent = {kernel}.get_parent()\n"
        "for kind, content in [('stream', {}), ('display_data', {'data': 1}), ('comm_open', {})]:\n"
        "    session.send(socket, kind, content, parent=parent)\n"
        "print('goes on')",
        timeout_s=60,
    )
    assert [said.text(rank) for rank in (0, 1)] == ["goes on\n"] * 2
    assert router.num_dropped == before + 6
