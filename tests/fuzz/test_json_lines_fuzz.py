"""Lines between the notebook, the agent and its fork server, among whatever else gets there."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gpupool.core.machine.json_lines import JsonLines
from tests.fuzz.limits import fuzzed, only_our_errors

OBJECTS = st.dictionaries(
    st.text(), st.none() | st.integers() | st.text() | st.lists(st.integers())
)
NONSENSE = (st.binary() | st.sampled_from([b"5", b"[1]", b"null", b"[" * 9999, b"9" * 9999])).map(
    lambda line: line.replace(b"\n", b"")
)


def is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def what_comes_of(content: bytes) -> list[dict[str, Any]]:
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)

    thread = threading.Thread(target=write)
    thread.start()
    found = []
    with os.fdopen(reader, "rb") as pipe, only_our_errors():
        lines = JsonLines(pipe)
        while not lines.closed:
            found += lines.read()
    thread.join()
    return found


@fuzzed
@given(st.lists(OBJECTS | NONSENSE.filter(lambda line: not is_object(line))))
@example([b"\xff\xfe", {"event": "ready"}, b"{", {"event": "killed"}])
def test_every_object_comes_in_order_and_nothing_else(lines: list[dict[str, Any] | bytes]) -> None:
    content = [json.dumps(one).encode() if isinstance(one, dict) else one for one in lines]
    expected = [one for one in lines if isinstance(one, dict)]
    assert what_comes_of(b"\n".join([*content, b""])) == expected


def test_a_line_without_an_end_takes_neither_time_nor_memory() -> None:
    """The next one is read."""
    endless = b"x" * 2**28
    assert what_comes_of(endless + b"\n{}\n") == [{}]
