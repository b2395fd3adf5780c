"""What is kept of the ranks' output, in which order it comes, and to which call it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import Pool
from gpupool.core.wire.masking import MASK, Secrets
from gpupool.core.wire.output import OutputKind
from gpupool.engine.output import channel
from gpupool.pool.calls import output
from gpupool.pool.calls.output import OutputRecorder, RankOutput
from gpupool.pool.engines.client import Router
from tests.support.processes import until


def output_of(*texts: str) -> RankOutput:
    shown = RankOutput()
    for text in texts:
        shown.add(OutputKind.STDOUT, text)
    return shown


def stream(text: str, call: str, **metadata: Any) -> dict[str, Any]:
    return {
        "header": {"msg_type": "stream"},
        "parent_header": {"msg_id": call},
        "metadata": metadata,
        "content": {"name": "stdout", "text": text},
        "buffers": [],
    }


@given(st.lists(st.integers(1, output.LAST_CHARS // 2), max_size=6), st.integers(0, 3))
def test_of_long_texts_the_first_and_the_last_are_kept(sizes: list[int], extra: int) -> None:
    shown = output_of("begin\n", *("x" * size for size in sizes), "y" * extra, "\nend")
    left_out = max(0, 10 + sum(sizes) + extra - output.HEAD_CHARS - output.LAST_CHARS)
    assert len(shown.text) < output.HEAD_CHARS + output.LAST_CHARS + 100
    assert shown.text.startswith("begin\n")
    assert shown.text.endswith("y" * extra + "\nend")
    assert (f"[... {left_out} characters left out ...]" in shown.text) == (left_out > 0)


def test_clearing_may_wait_for_what_comes_next() -> None:
    heard: list[tuple[str, Any]] = []
    recorder = OutputRecorder((0,), Secrets(), lambda rank, kind, content: heard.append((kind, 0)))
    recorder(0, OutputKind.STDOUT, "one\n")
    recorder(0, OutputKind.CLEAR, {"wait": True})
    assert recorder.outputs[0].text == "one\n"
    recorder(0, OutputKind.STDOUT, "two\n")
    assert recorder.outputs[0].text == "two\n"
    recorder(0, OutputKind.CLEAR, {"wait": False})
    assert recorder.outputs[0].text == ""
    assert [kind for kind, _ in heard] == ["stdout", "clear", "clear", "stdout", "clear"]


def test_late_text_is_masked_too_also_in_two_pieces() -> None:
    recorder = OutputRecorder((0,), Secrets(["s3cr3t"]))
    recorder.finish()
    for piece in ("late s3c", "r3t\n"):
        recorder(0, OutputKind.STDOUT, piece)
    assert recorder.outputs[0].text == f"late {MASK}\n"


def test_a_message_of_another_shape_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    router, recorder = Router(), OutputRecorder((0,), Secrets())
    router.listen("call", lambda kind, content: recorder(0, kind, content))
    good = stream("goes on", "call")
    for kind, content in (("stream", {}), ("display_data", {"data": 1})):
        router.route(good | {"header": {"msg_type": kind}, "content": content}, lambda _: None)
    router.route({"header": {}}, lambda _: None)
    assert caplog.text.count("was not taken in") == 3
    router.route(good, lambda _: None)
    recorder.finish()
    assert recorder.outputs[0].pieces() == ["goes on"]


# ---- on real ranks ---------------------------------------------------------------------------


def test_the_order_of_both_streams_and_of_c_code_is_kept(pool2: Pool) -> None:
    code = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for i in range(50):
    print("out", i)
    print("err", i, file=sys.stderr)
    os.write(1, b"fd %d\\n" % i)
    libc.printf(b"printf %d\\n", i)
    os.system(f"echo child {i}" if i < 3 else ":")
"""
    expected = ""
    for i in range(50):
        expected += f"out {i}\nerr {i}\nfd {i}\nprintf {i}\n" + (f"child {i}\n" if i < 3 else "")
    assert pool2.run(code).text(1) == expected
    flushed = pool2.run(
        "for i in range(300):\n    print(i, flush=True)\n    if i == 99: display('x')"
    )
    texts = ["".join(f"{i}\n" for i in numbers) for numbers in (range(100), range(100, 300))]
    assert [one for one in flushed.outputs[0].pieces() if isinstance(one, str)] == texts


LATE = """
import os, subprocess, threading, time
left = 1
def late():
    while not os.path.exists(go): time.sleep(0.02)
    print("thread")
    display({"text/plain": "figure"}, raw=True)
threading.Thread(target=late).start()
child = subprocess.Popen(f"while [ ! -e {go} ]; do sleep 0.02; done; echo child", shell=True)
"""


def test_late_output_belongs_to_the_last_cell_also_after_calls_of_the_pool_itself(
    pool2: Pool, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    cell = pool2.run(f"go = {str(go)!r}{LATE}", ranks=0)
    assert pool2["left"][0] == 1
    go.touch()
    shown = cell.outputs[0]
    # threads that cells of other tests have left may print as well
    until(lambda: {"child", "thread"} <= {*shown.text.split()}, 20, "the late text")
    until(lambda: "figure" in [one["data"]["text/plain"] for one in shown.displays], 20)


SCRIPTS_OUTPUT = {
    "buffer": ("o.buffer.write('xé'.encode()[:2]); o.buffer.write('é'.encode()[1:])", "xé"),
    "descriptor": ("print('a'); os.write(1, b'b\\n'); os.write(o.fileno(), b'c\\n')", "a\nb\nc\n"),
    "wrapper": (
        "w = io.TextIOWrapper(o.buffer, 'utf-8'); w.write('é\\n'); del w\n"
        "o.buffer.write(b'y\\n'); print('x')",
        "é\ny\nx\n",
    ),
    "child": ("subprocess.run(['echo', 'x'], stdout=o); subprocess.run(['echo', 'y'])", "x\ny\n"),
}


@pytest.mark.parametrize("way", SCRIPTS_OUTPUT)
def test_standard_output_is_the_text_stream_of_a_script(pool2: Pool, way: str) -> None:
    code, expected = SCRIPTS_OUTPUT[way]
    imports = "import io, os, subprocess, sys\no = sys.stdout\n"
    assert pool2.run(f"{imports}{code}\nNone").text(1) == expected


def test_a_flood_is_bounded_on_its_way_and_its_first_and_last_lines_are_kept(pool2: Pool) -> None:
    code = (
        "import sys\nmost = 0\nfor i in range(40_000):\n"
        "    print(i, 'x' * 100); "
        "most = max(most, sys.stdout._channel._num_chars)\nmost"
    )
    result = pool2.run(code, ranks=0)
    assert result[0] < channel.MAX_CHARS + 1000
    lines = result.text(0).splitlines()
    gap = next(n for n, line in enumerate(lines) if "left out" in line)
    expected = [f"{n} {'x' * 100}" for n in range(40_000)]
    assert lines[:1000] == expected[:1000]
    assert lines[gap + 2 :] == expected[gap + 2 - len(lines) :]
