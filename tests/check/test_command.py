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

from gpupool.check.command import STAGES, all_reduced
from tests.servers.s3 import SeaweedServer
from tests.support.pools import Pools
from tests.support.processes import gone, until

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?m)^test_\w+\.py::test_(\w+)\S* ok: (.+?) \([\d.]+ s\): (.+)$")


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Where the commands make their temporary files; nothing but a user's caches is left there."""
    folder = tmp_path / "t"
    folder.mkdir()
    yield folder
    caches = f"gpupool-{os.geteuid()}", "torchinductor_"
    assert [path.name for path in folder.iterdir() if not path.name.startswith(caches)] == []


@contextmanager
def checking(temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
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


def checked(temporary: Path, *arguments: str) -> tuple[int, str, str]:
    with checking(temporary, *arguments) as process:
        out, err = process.communicate(timeout=400)
    return process.returncode, out, err


def promises() -> dict[str, str]:
    texts = [path.read_text() for path in sorted((ROOT / "gpupool" / "check").glob("test_*.py"))]
    return dict(re.findall(r'def test_(\w+)\([^"]*\n    """(.+)"""', "\n".join(texts)))


# Those that no other test shows on CPU ranks; `--long` has all of them.
FEW = "start_and_stop or loopback or failure"


@pytest.mark.parametrize("some", [FEW, pytest.param("", marks=pytest.mark.long)])
def test_promises_are_kept_on_cpu_ranks_and_nothing_is_left(temporary: Path, some: str) -> None:
    status, out, err = checked(temporary, "--cpu", *(["-k", some] if some else []))
    found = LINE.findall(out)
    names = some.split(" or ") if some else promises()
    assert {name: promise for name, promise, _ in found} == {n: promises()[n] for n in names}
    told = {name: text for name, _, text in found}
    assert told["failure"].startswith("equal to the last bit: the checkpoint of step 60")
    assert (status, err) == (0, "")


def test_a_pool_by_its_name_is_tried_in_stages(temporary: Path, s3: SeaweedServer) -> None:
    os.environ.update(s3.env)
    bucket = s3.make_bucket("stages")
    s3.put_objects("stages", {f"{n}.txt": b"x" for n in range(3)})
    status, out, err = checked(temporary, "local", bucket)
    found = dict(re.findall(r"(?m)^  ok  (.+) \([\d.]+ s\): (.+)$", out))
    assert (list(found), status, err.count("Traceback")) == (list(STAGES), 0, 0)
    assert re.fullmatch(r"64 MiB at \S+ GB/s \(bus\)", found["all_reduce"])
    assert found["S3"].startswith("3 names in a page of s3://")


def test_on_one_rank_nothing_travels_and_nothing_has_a_rate(pools: Pools) -> None:
    assert all_reduced(pools[1], 1) == "1 MiB"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_has_a_report_and_nothing_is_left(
    temporary: Path, number: signal.Signals
) -> None:
    """The stop button of a notebook is SIGINT."""
    with checking(temporary, "--cpu", "-k", "group or hang") as process:
        assert process.stdout is not None
        text = ""
        while "::test_hang" not in text:  # it begins now, and lasts for 9 s
            text += process.stdout.read(1)
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert family
        process.send_signal(number)
        assert "KeyboardInterrupt" in process.stdout.read()
        assert process.wait(60) == 2
    until(lambda: gone(*family), 10.0, "the end of its processes")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cpu", "--gpu"], "not allowed with argument"),
        (["nonsense"], "OptionsError: "),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_a_status_of_its_own(
    temporary: Path, arguments: list[str], sentence: str
) -> None:
    status, _, err = checked(temporary, *arguments)
    assert (status, sentence in err, "Traceback" in err) == (2, True, False)


def test_the_docs_have_every_line() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    assert dict(re.findall(r"^\| `(.+)` \| (.+) \|$", page, re.M)) == promises()
