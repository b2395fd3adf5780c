"""What is kept of the ranks' output: everything at first, then the first and the last."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import Pool, PoolError, SpmdError
from gpupool.core.wire.masking import MASK, Secrets
from gpupool.core.wire.output import OutputKind
from gpupool.core.wire.replies import CodeReply
from gpupool.pool.calls import output
from gpupool.pool.calls.output import OutputRecorder, RankOutput
from gpupool.pool.engines import iopub
from gpupool.pool.engines.iopub import Router
from gpupool.pool.result import SpmdResult
from tests.support.processes import until
from tests.support.raising import raises


def output_of(*texts: str) -> RankOutput:
    shown = RankOutput()
    for text in texts:
        shown.add_text(text)
    return shown


def result_of(text: str = "said") -> SpmdResult:
    return SpmdResult({0: CodeReply(None, "", 0.1)}, {0: output_of(text)}, 0.2)


def stream(text: str, call: str, **metadata: Any) -> dict[str, Any]:
    return {
        "header": {"msg_type": "stream"},
        "parent_header": {"msg_id": call},
        "metadata": metadata,
        "content": {"name": "stdout", "text": text},
        "buffers": [],
    }


@given(st.lists(st.text("ab\n", max_size=30), max_size=20))
def test_short_texts_are_kept_whole(pieces: list[str]) -> None:
    assert output_of(*pieces).text == "".join(pieces)


@given(st.lists(st.integers(1, output.LAST_CHARS // 2), max_size=6), st.integers(0, 3))
def test_of_long_texts_the_first_and_the_last_are_kept(sizes: list[int], extra: int) -> None:
    shown = output_of("begin\n", *("x" * size for size in sizes), "y" * extra, "\nend")
    left_out = max(0, 10 + sum(sizes) + extra - output.HEAD_CHARS - output.LAST_CHARS)
    assert len(shown.text) < output.HEAD_CHARS + output.LAST_CHARS + 100
    assert shown.text.startswith("begin\n")
    assert shown.text.endswith("y" * extra + "\nend")
    assert (f"[... {left_out} characters left out ...]" in shown.text) == (left_out > 0)


def test_a_display_is_updated_in_its_place() -> None:
    shown = RankOutput()
    shown.add_display(
        OutputKind.DISPLAY, {"data": {"text/html": "1"}, "transient": {"display_id": "a"}}
    )
    shown.add_display(OutputKind.DISPLAY, {"data": {"text/html": "2"}})
    assert shown.update_display({"data": {"text/html": "3"}, "transient": {"display_id": "a"}})
    assert [bundle["data"]["text/html"] for bundle in shown.displays] == ["3", "2"]
    assert not shown.update_display({"data": {}, "transient": {"display_id": "b"}})


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


def test_a_result_that_nobody_has_is_let_go() -> None:
    reference = weakref.ref(result_of())
    gc.collect()
    assert reference() is None


def test_text_of_two_streams_that_alternate_comes_in_its_pieces() -> None:
    heard: list[tuple[str, Any]] = []
    router = Router()
    router.listen("call", lambda kind, content: heard.append((kind, content)))
    router.route(stream("abcdef", "call", **{iopub.PIECES: [1, 2, 3]}), lambda _: None)
    assert heard == [("stdout", "a"), ("stderr", "bc"), ("stdout", "def")]


def test_calls_of_long_ago_are_forgotten() -> None:
    router = Router()
    heard: list[str] = []
    for n in range(iopub.MAX_LISTENERS + 1):
        router.listen(f"call{n}", lambda kind, content: heard.append(content))
    router.route(stream("late\n", "call0"), lambda _: None)
    router.route(stream("known\n", "call1"), lambda _: None)
    assert heard == ["known\n"]


def test_a_listener_that_fails_does_not_end_the_hearing(caplog: pytest.LogCaptureFixture) -> None:
    router = Router()
    router.listen("call", lambda kind, content: 1 / 0)
    router.route(stream("x", "call"), lambda _: None)
    assert "was not taken in" in caplog.text


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", {}),
        ("display_data", {"data": 1}),
        ("display_data", {"data": "x"}),
        ("comm_open", {}),
    ],
)
def test_a_message_of_another_shape_is_dropped(kind: str, content: dict[str, Any]) -> None:
    router, recorder = Router(), OutputRecorder((0,), Secrets())
    router.listen("call", lambda kind, content: recorder(0, kind, content))
    for odd in ({"header": {}}, stream("x", "call") | {"content": content}):
        router.route(odd | {"header": {"msg_type": kind}}, lambda _: None)
    router.route(stream("goes on", "call"), lambda _: None)
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


def test_both_streams_come_in_few_messages_however_often_they_alternate(pool2: Pool) -> None:
    code = (
        "import sys\nfor i in range(5000):\n    print('o', i)\n    print('e', i, file=sys.stderr)"
    )
    said = pool2.run(code, ranks=0).text(0)
    assert said == "".join(f"o {i}\ne {i}\n" for i in range(5000))


def test_text_and_displays_are_in_order_also_with_many_flushes(pool2: Pool) -> None:
    heard: list[str] = []

    def on_output(rank: int, kind: str, content: Any) -> None:
        heard.append(content if isinstance(content, str) else content["data"]["text/plain"])

    code = """
for i in range(300):
    print(i, flush=True)
    if i % 100 == 99:
        display({"text/plain": f"<{i}>"}, raw=True)
"""
    pool2.begin(code, ranks=(0,), on_output=on_output).result()
    expected = "".join(f"{i}\n" + (f"<{i}>" if i % 100 == 99 else "") for i in range(300))
    assert "".join(heard) == expected


@pytest.mark.parametrize("start", ["threading.Thread(target=late).start()", "pool.submit(late)"])
def test_text_of_threads_belongs_to_the_call_that_has_started_them(pool2: Pool, start: str) -> None:
    pool2.run(
        "import threading, concurrent.futures\n"
        "pool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "pool.submit(print).result()\n"  # the thread is there before the call that uses it
        "go = threading.Event()\n"
        "def late():\n    go.wait(20); print('late', rank)"
    )
    first = pool2.run(start)
    second = pool2.run("go.set(); print('second')")
    until(lambda: "late" in first.text(0), 10, "the late text")
    assert first.text(0) == "late 0\n"
    assert second.text(0) == "second\n"


def test_text_of_forked_children_and_of_programs_is_shown(pool2: Pool) -> None:
    code = """
import os, subprocess
child = os.fork()
if child == 0:
    print("forked", flush=True)
    os._exit(0)
os.waitpid(child, 0)
subprocess.run(["sh", "-c", "echo program; echo its error >&2"])
print("end")
"""
    lines = pool2.run(code, ranks=0).text(0).splitlines()
    assert sorted(lines) == ["end", "forked", "its error", "program"]
    assert lines[-1] == "end"


def test_characters_that_are_cut_by_a_read_are_whole(pool2: Pool) -> None:
    said = pool2.run("import os\nfor i in range(30_000): os.write(1, 'xé€'.encode())", ranks=0)
    assert said.text(0) == "xé€" * 30_000


SCRIPTS_OUTPUT = {
    "buffer": ("o.buffer.write('xé'.encode()[:2]); o.buffer.write('é'.encode()[1:])", "xé"),
    "reconfigure": ("o.reconfigure(line_buffering=True, errors='replace'); print('x')", "x\n"),
    "latin": (
        "o.reconfigure(encoding='latin-1'); o.buffer.write(b'\\xe9')\n"
        "o.reconfigure(encoding='utf-8')",
        "é",
    ),
    "facts": (
        "print(o.isatty(), o.encoding.lower(), o.errors, o.fileno(), o.writable(), o.closed)",
        "False utf-8 strict 1 True False\n",
    ),
    "descriptor": ("print('a'); os.write(1, b'b\\n'); os.write(o.fileno(), b'c\\n')", "a\nb\nc\n"),
    "wrapper": (
        "w = io.TextIOWrapper(o.buffer, 'utf-8'); w.write('é\\n'); del w; print('x')",
        "é\nx\n",
    ),
    "underlying": ("print('a', file=sys.__stdout__); print('b', file=sys.__stderr__)", "a\nb\n"),
    "click": ("w = codecs.getwriter('utf-8')(o.buffer); w.write('é'); w.flush()", "é"),
    "child": ("subprocess.run(['echo', 'x'], stdout=o); subprocess.run(['echo', 'y'])", "x\ny\n"),
    "child's error": ("subprocess.run('echo x >&2', shell=True, stderr=sys.stderr)", "x\n"),
    "logging": ("logging.getLogger('a.b').warning('said')", "said\n"),
    "stack": ("faulthandler.dump_traceback(sys.stderr, False)", "(most recent call first)"),
    "tqdm": ("for _ in tqdm.tqdm(range(3)): pass\ntqdm.tqdm.write('w')", "3/3"),
    "lines": ("o.writelines(['a\\n', 'b\\n']); o.flush()", "a\nb\n"),
}


@pytest.mark.parametrize("way", SCRIPTS_OUTPUT)
def test_standard_output_is_the_text_stream_of_a_script(pool2: Pool, way: str) -> None:
    code, expected = SCRIPTS_OUTPUT[way]
    imports = (
        "import codecs, faulthandler, io, logging, os, subprocess, sys, tqdm\no = sys.stdout\n"
    )
    for rank in (0, 1):
        said = pool2.run(f"{imports}{code}\nNone").text(rank)
        assert expected in said if way in ("stack", "tqdm", "logging") else said == expected


def test_what_is_not_text_is_refused_as_by_a_text_stream(pool2: Pool) -> None:
    for code in ("sys.stdout.write(3)", "sys.stdout.buffer.write('x')"):
        with pytest.raises(SpmdError, match="TypeError"):
            pool2.run(f"import sys\n{code}")


def test_workers_of_a_data_loader_are_heard(pool2: Pool) -> None:
    code = """
class Loud(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        print("sample", i)
        return i
list(torch.utils.data.DataLoader(Loud(), num_workers=1))
"""
    assert pool2.run(code, ranks=0).text(0) == "sample 0\nsample 1\n"


def test_of_a_flood_the_first_and_the_last_come_whole_and_in_order(pool2: Pool) -> None:
    # Long lines: to print them takes a fraction of the time that they need to be sent. The first
    # have gone before, however slow the thread is that sends them: by a flush, which is done at
    # once unless there were very many in the last second.
    code = (
        "import sys, time\ntime.sleep(1.1)\nfor i in range(40_000):\n"
        "    print(i, 'x' * (90 if i < 1500 else 5000))\n"
        "    if i == 1499: sys.stdout.flush()"
    )
    said = pool2.run(code, ranks=0).text(0).splitlines()
    numbers = [int(line.split()[0]) for line in said if line.endswith("x") and line[0].isdigit()]
    assert numbers[:1500] == list(range(1500))
    assert numbers[-100:] == list(range(39_900, 40_000))
    assert len(numbers) < 40_000


@pytest.mark.long
def test_a_flood_hides_secrets_also_where_it_is_cut(pool2: Pool) -> None:
    import os

    os.environ["FLOOD_TOKEN"] = "s3cr3t-" * 6
    pool2.propagate_env("FLOOD_TOKEN")
    try:
        code = (
            "import os\nfor i in range(300_000):\n    print(i, os.environ['FLOOD_TOKEN'] * 2)\n"
            "list(globals().get('shell', []))"
        )
        said = pool2.run(code, ranks=0).text(0)
        assert "s3cr3t" not in said
        assert MASK in said
    finally:
        pool2.propagate_env("FLOOD_TOKEN", unset=True)


def test_the_engine_keeps_nothing_of_what_cells_have_shown(pool2: Pool) -> None:
    pool2.run("for i in range(1000): print(i)")
    kept = "len(get_ipython().history_manager.outputs)"
    assert set(pool2.run(kept).values()) == {0}


def test_nothing_of_late_text_is_kept_by_ipyparallel(pool2: Pool) -> None:
    client = pool2._all_ranks.engines._client._client  # type: ignore[attr-defined]
    before = set(client._futures)  # calls that an engine took along when it was killed
    first = pool2.run(
        "import threading; threading.Timer(0.3, lambda: print('late')).start()", ranks=0
    )
    until(lambda: first.text(0) == "late\n", 10, "the late text")
    done = threading.Event()
    client._io_loop.add_callback(done.set)
    assert done.wait(10)
    assert not [key for key in client.metadata if key != "submitted"]
    assert set(client._futures) <= before
    assert not client._output_futures


def test_a_rank_that_took_no_part_is_named() -> None:
    with raises(PoolError, "no part", ranks=(7,)):
        result_of().text(7)
