"""Lines between the notebook, the agent and its fork server, among whatever else gets there."""

from __future__ import annotations

import json
import os
import threading

from hypothesis import example, given
from hypothesis import strategies as st

from gpupool.core.wire.agent import EVENTS, Event, Exited, Killed, Ready, Spawned
from gpupool.core.wire.json_lines import JsonLines, encode
from tests.fuzz.limits import MAX_MEMORY_KIB, fuzzed, only_our_errors

MESSAGES: st.SearchStrategy[Event] = (
    st.sampled_from([Ready(), Killed()])
    | st.builds(Spawned, st.text(), st.integers())
    | st.builds(Exited, st.text(), st.integers(), st.text(), st.text())
)
OBJECTS = st.dictionaries(
    st.text() | st.sampled_from(["kind", "name", "pid"]),
    st.none() | st.integers() | st.text() | st.lists(st.integers()) | st.just("spawned"),
)
NONSENSE = (
    st.binary()
    | st.sampled_from([b"5", b"[1]", b"null", b"[" * 9999, b"9" * 9999])
    | OBJECTS.map(lambda one: json.dumps(one).encode())
).map(lambda line: line.replace(b"\n", b""))


def is_message(line: bytes) -> bool:
    """Whether chance has made one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    fields = set(found) if isinstance(found, dict) else set()
    return fields in ({"kind"}, {"kind", "name", "pid"})


def what_comes_of(content: bytes, max_memory_kib: int = MAX_MEMORY_KIB) -> list[Event]:
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)

    thread = threading.Thread(target=write)
    thread.start()
    found = []
    with os.fdopen(reader, "rb") as pipe, only_our_errors(max_memory_kib):
        lines = JsonLines(pipe, EVENTS)
        while not lines.closed:
            found += lines.read()
    thread.join()
    return found


@fuzzed
@given(st.lists(MESSAGES | NONSENSE.filter(lambda line: not is_message(line))))
@example([b"\xff\xfe", Ready(), b"{", b"{}", b'{"kind": []}', b'{"kind": "spawned"}', Killed()])
def test_every_message_comes_in_order_and_nothing_else(lines: list[Event | bytes]) -> None:
    content = [one if isinstance(one, bytes) else encode(one).rstrip(b"\n") for one in lines]
    expected = [one for one in lines if not isinstance(one, bytes)]
    assert what_comes_of(b"\n".join([*content, b""])) == expected


def test_a_line_without_an_end_takes_neither_time_nor_memory() -> None:
    """The next one is read."""
    endless = b"x" * 2**26
    content = endless + b"\n" + encode(Ready())
    assert what_comes_of(content, max_memory_kib=160 * 1024) == [Ready()]
