"""`python -m gpupool check`, as it is typed: what it prints, its status, and what it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gpupool.check.hosts import STAGES
from gpupool.core.machine.gpus import discover
from tests.servers.s3 import SeaweedServer
from tests.support.processes import gone, until

LIMIT_S = 170.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the commands make their temporary files."""
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


@contextmanager
def checking(temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, whose lines can be read as they come."""
    with subprocess.Popen(
        [sys.executable, "-m", "gpupool", "check", *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def checked(temporary: Path, *arguments: str, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Status, stdout and stderr of the command."""
    with checking(temporary, *arguments) as process:
        out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


LINE = re.compile(r"(?m)^ *(ok|FAIL|skip)  ([\w-]+): (.+?) \([\d.]+ s\)(?:: (.*))?$")
FILES = sorted((ROOT / "gpupool" / "check").glob("test_*.py"))


def promises() -> dict[str, str]:
    """Name -> promise, of all functions that are tried."""
    found = {}
    for path in FILES:
        for name, promise in re.findall(r'def test_(\w+)\(.*\n    """(.+)"""', path.read_text()):
            found[name.replace("_", "-")] = promise
    return found


def test_promises_are_kept_on_cpu_ranks_and_nothing_is_left(temporary: Path) -> None:
    names = ["loopback", "failure"]
    report = temporary.parent / "report.xml"
    status, out, err = checked(temporary, "--cpu", "--only", *names, "--junitxml", str(report))
    lines = {name: (verdict, text) for verdict, name, _, text in LINE.findall(out)}
    assert {name: verdict for name, (verdict, _) in lines.items()} == dict.fromkeys(
        ["start", *names, "stop"], "ok"
    )
    assert (status, err) == (0, "")
    assert lines["failure"][1].startswith("equal to the last bit: the checkpoint of step 60")
    assert report.read_text().count("<testcase ") == len(lines)
    assert left(temporary) == set()


def test_a_pool_by_its_name_is_tried_in_stages(temporary: Path, s3: SeaweedServer) -> None:
    os.environ.update(s3.env)
    bucket = s3.make_bucket("stages")
    s3.put_objects("stages", {f"{n}.txt": b"x" for n in range(3)})
    status, out, err = checked(temporary, "local", bucket)
    found = dict(re.findall(r"(?m)^  ok  (.+) \([\d.]+ s\): (.+)$", out))
    assert (list(found), status, err.count("Traceback")) == (list(STAGES), 0, 0)
    assert found["all_reduce"].startswith("64 MiB at ")
    assert found["S3"].startswith("3 names in a page of s3://")
    assert left(temporary) == set()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_promise_is_kept_on_cpu_ranks(temporary: Path) -> None:
    status, out, err = checked(temporary, "--cpu", limit_s=850)
    found = LINE.findall(out)
    assert {name: promise for _, name, promise, _ in found} == promises()
    assert [line for line in found if line[0] != "ok"] == []
    assert status == 0, err
    assert left(temporary) == set()


@pytest.mark.long
@pytest.mark.skipif(bool(discover().usable), reason="there is a GPU")
def test_a_promise_that_is_not_kept_is_a_line_and_the_status(temporary: Path) -> None:
    status, out, _ = checked(temporary, "--gpu", "--only", "kill")
    assert re.match(r"gpupool \S+, Python 3\.\S+, torch \S+, ", out)
    [(verdict, name, _, text)] = LINE.findall(out)
    assert (verdict, name, status) == ("FAIL", "start", 1)
    assert re.match("gpupool.*PlacementError: .*no NVIDIA driver", text)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_whoever_ends_it_has_a_report_and_nothing_is_left(
    temporary: Path, number: signal.Signals | None
) -> None:
    """The stop button of a notebook is SIGINT; None: whoever reads it goes away."""
    with checking(temporary, "--cpu", "--only", "kill") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("  ok  start") for line in lines)
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert family
        if number is None:
            process.stdout.close()
            assert process.wait(60) != 0
        else:
            process.send_signal(number)
            assert "KeyboardInterrupt" in "".join(lines)
            assert process.wait(60) == 130
    until(lambda: gone(*family), 10.0, "the end of its processes")
    assert left(temporary) == set()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cpu", "--gpu"], "argument --gpu: not allowed with argument --cpu"),
        (["--cpu", "--gpus", "0"], "exclude each other"),
        (["lab", "--cpu"], "check NAME takes an s3://... and nothing else"),
        (["nonsense"], "OptionsError: "),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_a_status_of_its_own(
    temporary: Path, arguments: list[str], sentence: str
) -> None:
    status, _, err = checked(temporary, *arguments)
    assert (status, sentence in err) == (126, True)
    assert "Traceback" not in err


def test_the_docs_have_every_line() -> None:
    page = (ROOT / "docs" / "explanation" / "promises.md").read_text()
    assert dict(re.findall(r"^\| `(.+)` \| (.+) \|$", page, re.M)) == promises()


def left(temporary: Path) -> set[str]:
    """The temporary files that are there, but for a user's caches: of gpupool, and of torch."""
    caches = f"gpupool-{os.geteuid()}", "torchinductor_"
    return {path.name for path in temporary.iterdir() if not path.name.startswith(caches)}
