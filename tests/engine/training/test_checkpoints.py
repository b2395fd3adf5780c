"""Files of checkpoints: complete or not there, wherever they lie, and told in one sentence if not.

Real files, a real S3 server.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import resource
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.wire.events import CheckpointEvent, WarningEvent
from gpupool.data.stores.writable import Target
from gpupool.engine.checkpoint.weights import copying
from gpupool.engine.training.checkpoints import _MARK, Checkpoints, packed
from tests.fuzz.limits import only_our_errors
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises


def state(value: float = 1.0) -> dict[str, Any]:
    """What a training may hold: tensors of several kinds in a nest, and plain values."""
    return {
        "weights": torch.full((3, 4), value),
        "images": torch.full((2, 3, 4, 4), value).to(memory_format=torch.channels_last),
        "nest": {"moments": [torch.arange(3), None], 7: (0.9, torch.tensor(value).double())},
        "name": "run",
    }


def same(one: Any, value: float) -> bool:
    return saved(one) == saved(state(value))


def write(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(state(step), step)
    checkpoints.finish()


def newest(place: object) -> dict[str, Any]:
    found = Checkpoints(str(place)).load_newest()
    assert found is not None
    return found[1]


def news(checkpoints: Checkpoints) -> tuple[list[int], list[str]]:
    told, checkpoints.news = checkpoints.news, []
    written = [one.step for one in told if isinstance(one, CheckpointEvent)]
    return written, [one.message for one in told if isinstance(one, WarningEvent)]


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "run")
    server: SeaweedServer = request.getfixturevalue("s3")
    os.environ.update(server.env)
    return f"{server.make_bucket(f'run-{uuid4().hex}')}/run"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_file_that_was_cut_short_or_changed_gives_another_state(
    tmp_path: Path, data: st.DataObject
) -> None:
    """torch reads no checksum of those that it writes."""
    whole = packed({"a": torch.arange(5)})
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    for content, is_cut in ((whole[:place], True), (bytes(changed), False)):
        (tmp_path / "step-00000001.pt").write_bytes(content)
        found = Checkpoints(str(tmp_path)).load_newest()
        assert found is None or (not is_cut and torch.equal(found[1]["a"], torch.arange(5)))


def test_a_part_that_is_marked_as_a_folder_is_damage(tmp_path: Path) -> None:
    """torch would give what lies in memory just then; no checksum tells."""
    whole = packed({"a": torch.arange(5)})
    places = [found.start() + 38 for found in re.finditer(b"PK\1\2", whole)]
    assert len(places) > 4
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 0x10
        (tmp_path / "step-00000001.pt").write_bytes(changed)
        assert Checkpoints(str(tmp_path)).load_newest() is None


@pytest.mark.gpu
def test_a_gpu_does_not_wait_for_a_copy_and_later_kernels_do_not_change_it() -> None:
    live = torch.ones(64, 2**20, device="cuda")
    copy, marks = copying({"live": live})
    live.fill_(2)  # behind the copy, in the order of the stream
    for mark in marks:
        mark.synchronize()
    assert copy["live"].is_pinned()
    assert bool((copy["live"] == 1).all())


def test_a_place_that_cannot_be_written_to_is_told_before_training(
    tmp_path: Path, s3: SeaweedServer
) -> None:
    (tmp_path / "file").write_text("not a folder")
    os.environ.update(s3.env)
    for place in (tmp_path / "file", tmp_path / "file" / "run", "s3://no-such-bucket-here/run"):
        with raises(DataError, str(place)):
            Checkpoints(str(place)).check()


def test_a_full_disk_is_said_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A file-size limit of this process stands for the disk: the write fails in the middle."""
    checkpoints = Checkpoints(str(tmp_path))
    write(checkpoints, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        checkpoints.save({"a": torch.zeros(100_000)}, 2)
        checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    written, (failed,) = news(checkpoints)
    assert written == [1]
    assert f"{tmp_path}/step-00000002.pt" in failed
    assert "File too large" in failed
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_what_cut_off_writers_have_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    days_ago = time.time() - 2 * 86_400
    left, new = (tmp_path / f".gpupool-step-{name}.pt.0a1b2c3d.part" for name in ("left", "new"))
    own = [tmp_path / name for name in (".movie.mp4.part", ".results.csv.part", "step.part")]
    for path in (left, new, *own):
        path.write_bytes(b"half")
        if path != new:
            os.utime(path, (days_ago, days_ago))
    Checkpoints(str(tmp_path)).check()
    assert set(tmp_path.iterdir()) == {new, *own}


def test_the_last_two_are_kept_and_files_of_the_users_that_are_named_so(url: str) -> None:
    own = {f"step-{step:08}.pt": saved({"my": "own"}) for step in range(20)}
    own |= {".movie.mp4.part": b"mine", "step-1.pt": b""}
    target = Target(url)
    for name, data in own.items():
        target.put(name, data)
    checkpoints = Checkpoints(url)
    checkpoints.check()
    assert checkpoints.load_newest() is None
    for step in (5, 10, 15, 20):
        live = state(step)
        checkpoints.save(live, step, fixed={"step": step})
        live["weights"].fill_(0)  # training goes on, whether it is written yet or not
    checkpoints.finish()
    assert news(checkpoints) == ([5, 10, 15, 20], [])
    found = newest(url)
    assert found.pop("step") == 20
    assert same(found, 20)
    assert all(target.get(name) == data for name, data in own.items())
    assert set(target.names()) - set(own) == {"step-000000015.pt", "step-00000020.pt"}
    again = Checkpoints(url)  # a resumed one takes over what it finds
    again.check(20)
    write(again, 25)
    assert set(target.names()) - set(own) == {"step-00000020.pt", "step-00000025.pt"}


def test_overwriting_removes_complete_ones_of_another_training_and_nothing_else(url: str) -> None:
    write(Checkpoints(url, keep=9), 5, 10, 20)
    target = Target(url)
    own = {"step-00000007.pt": b"mine", "best.pt": target.get("step-00000020.pt")}
    for name, data in own.items():
        target.put(name, data)
    new = Checkpoints(url)
    with raises(TrainingError, "step-00000020.pt ", "overwrite=True"):
        new.check()
    new.check(0, overwrite=True)
    assert same(new.load("step-00000010.pt"), 10)  # until there is a new one
    new.save({"not": threading.Lock()}, 2)
    new.save({"not": object}, 3)
    new.save(state(3), 9, why_not=lambda: "the device had not computed it")
    new.finish()
    assert same(new.load("step-00000010.pt"), 10)
    assert len(news(new)[1]) == 3  # of what could not be saved
    new.save(state(105), 5)  # of a name that an old one has
    write(new, 6)
    assert (news(new)[0], same(new.load("step-00000005.pt"), 105)) == ([5, 6], True)
    assert all(target.get(name) == data for name, data in own.items())
    assert set(target.names()) - set(own) == {"step-00000005.pt", "step-00000006.pt"}


def test_two_trainings_in_one_folder_at_one_time_lose_nothing(tmp_path: Path) -> None:
    trainings = [Checkpoints(str(tmp_path)) for _ in range(2)]

    def train(number: int) -> list[Any]:
        for step in range(1, 31):
            trainings[number].save(state(number), step)
        trainings[number].finish()
        urls = [one.url for one in trainings[number].news if isinstance(one, CheckpointEvent)]
        assert len(urls) == 30
        return [trainings[number].load(Path(url).name) for url in urls[-2:]]

    with ThreadPoolExecutor(2) as threads:
        kept = list(threads.map(train, range(2)))
    assert all(same(one, number) for number in range(2) for one in kept[number])
    assert len(list(tmp_path.iterdir())) == 4


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zipped(entries: Mapping[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def deflated(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    return zipped(entries, zipfile.ZIP_DEFLATED)


NO_CHECKPOINTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a pickle": (lambda: pickle.dumps(Runs()), "damaged"),
    "code": (lambda: saved({"format": 1, "x": Runs()}), "not safe"),
    "list": (lambda: saved([1, 2]), "damaged"),
    "no data.pkl": (lambda: zipped({"a/b": b"c"}), "not safe"),
    "control characters": (lambda: zipped({"a/data.pkl": b"c\x1b[2J\nboom\n."}), "not safe"),
    "compressed": (lambda: deflated(saved({"zeros": torch.zeros(2**24)})), "damaged"),
    "hidden behind others": (lambda: saved({}) + deflated(saved({})), "damaged"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_marked_but_no_checkpoint_is_neither_run_nor_unpacked(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, what = NO_CHECKPOINTS[kind]
    path, checkpoints = tmp_path / "step-00000009.pt", Checkpoints(str(tmp_path))
    path.write_bytes(make() + _MARK)
    with only_our_errors(), raises(DataError, path.name, kind=what):
        checkpoints.load(path.name)
    if what == "damaged":
        assert checkpoints.load_newest() is None
    else:  # nothing begins anew because of it
        with raises(DataError, path.name, kind=what):
            checkpoints.load_newest()
    assert list(checkpoints.passed_over) == [path.name]
    assert list(tmp_path.iterdir()) == [path]
    write(Checkpoints(str(tmp_path)), 8)
    assert same(newest(tmp_path), 8)
