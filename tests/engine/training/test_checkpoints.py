"""Files of checkpoints: complete or not there, wherever they lie, and told in one sentence if not.

Real files, a real S3 server.
"""

from __future__ import annotations

import io
import os
import pickle
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

from gpupool import Profile, TrainingOptions
from gpupool.core.errors import DataError, GpuPoolError, OptionsError, TrainingError
from gpupool.core.options.training_options import changed
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


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def write(checkpoints: Checkpoints, value: float, step: int) -> None:
    checkpoints.save(state(value), step)
    checkpoints.finish()


def newest(place: object) -> dict[str, Any]:
    found = Checkpoints(str(place)).load_newest()
    assert found is not None
    return found[1]


def news(checkpoints: Checkpoints) -> tuple[list[int], list[DataError]]:
    """Steps that were written, and what has failed."""
    told = checkpoints.news()
    failed = [one for one in told if isinstance(one, DataError)]
    return [one.step for one in told if not isinstance(one, DataError)], failed


@pytest.fixture(params=["folder", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder of each kind."""
    if request.param == "folder":
        return str(tmp_path / "run")
    if request.param == "file":
        return f"file://{tmp_path}/run"
    server: SeaweedServer = request.getfixturevalue("s3")
    os.environ.update(server.env)
    return f"{server.make_bucket(f'run-{uuid4().hex}')}/run"


def test_what_is_saved_comes_back_and_the_last_two_are_kept(url: str) -> None:
    checkpoints = Checkpoints(url)
    checkpoints.check()
    assert checkpoints.load_newest() is None
    for step in (8, 9, 10):
        checkpoints.save(state(step), step, fixed={"step": step})
    checkpoints.finish()
    assert checkpoints.names() == ["step-00000009.pt", "step-00000010.pt"]
    assert news(checkpoints) == ([8, 9, 10], [])
    assert equal(newest(url), state(10) | {"step": 10})
    assert equal(Checkpoints(url).load("step-00000009.pt"), state(9) | {"step": 9})
    assert Target(url).names() == checkpoints.names()  # nothing else is left there


def test_a_damaged_newest_one_is_passed_over(url: str) -> None:
    checkpoints = Checkpoints(url)
    write(checkpoints, 1, 1)
    target = Target(url)
    whole = target.get("step-00000001.pt")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    bad = {2: whole[:-1], 3: whole[:100], 4: b"", 5: bytes(flipped), 6: b"not of gpupool" * 99}
    for step, data in bad.items():
        target.put(f"step-{step:08}.pt", data)
    target.put("notes.txt", b"mine")
    found = checkpoints.load_newest()
    assert found is not None
    assert found[0] == "step-00000001.pt"
    assert checkpoints.passed_over == [f"step-{step:08}.pt" for step in (6, 5, 4, 3, 2)]
    with raises(DataError, "step-00000005.pt ", kind="damaged"):
        checkpoints.load("step-00000005.pt")
    checkpoints.check(step=1)  # what was passed over stands in nobody's way


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
    name = "step-00000001.pt"
    for content, is_cut in ((whole[:place], True), (bytes(changed), False)):
        (tmp_path / name).write_bytes(content)
        found = Checkpoints(str(tmp_path)).load_newest()
        assert found is None or (not is_cut and equal(found[1], {"a": torch.arange(5)}))


def test_training_may_go_on_while_a_copy_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    live = state(1)
    before = [tensor.data_ptr() for tensor in (live["weights"], live["images"])]
    checkpoints.save(live, 1)
    live["weights"].fill_(2)  # at once, whether it is written yet or not
    live["images"].zero_()
    checkpoints.finish()
    assert equal(newest(tmp_path), state(1))
    assert before == [tensor.data_ptr() for tensor in (live["weights"], live["images"])]


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
    cases = {
        str(tmp_path / "file"): "File exists",
        str(tmp_path / "file" / "run"): "Not a directory",
        "/proc/run": "",
        "s3://no-such-bucket-here/run": "",
    }
    for place, shown in cases.items():
        with raises(TrainingError, place, shown):
            Checkpoints(place).check()


def test_a_full_disk_is_said_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A file-size limit of this process stands for the disk: the write fails in the middle."""
    import resource
    import signal

    checkpoints = Checkpoints(str(tmp_path))
    write(checkpoints, 1, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        checkpoints.save({"a": torch.zeros(100_000)}, 2)
        checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    written, failed = news(checkpoints)
    assert written == [1]
    assert (failed[0].kind, failed[0].url) == ("disk", str(tmp_path / "step-00000002.pt"))
    assert "File too large" in str(failed[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_what_cut_off_writers_have_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    days_ago = time.time() - 2 * 86_400
    left, new = (tmp_path / f".gpupool-step-{name}.pt.0a1b2c3d.part" for name in ("left", "new"))
    own = [tmp_path / name for name in (".movie.mp4.part", ".results.csv.part", "step.part")]
    for path in (left, new, *own):
        path.write_bytes(b"half")
        if path != new:
            os.utime(path, (days_ago, days_ago))
    linked = tmp_path / ".gpupool-link.part"
    linked.symlink_to(own[0])
    Checkpoints(str(tmp_path)).check()
    assert set(tmp_path.iterdir()) == {new, linked, *own}


def test_files_of_the_users_that_are_named_as_checkpoints_survive_a_training(url: str) -> None:
    """All that a training does with its folder, with two of its checkpoints kept."""
    buffer = io.BytesIO()
    torch.save({"my": "own"}, buffer)
    own = {f"step-{step:08}.pt": buffer.getvalue() for step in range(20)}
    own |= {".movie.mp4.part": b"mine", "step-00000007.pt.part": b"mine", "step-1.pt": b""}
    target = Target(url)
    for name, data in own.items():
        target.put(name, data)
    checkpoints = Checkpoints(url, keep=2)
    checkpoints.check()
    for step in (5, 10, 15, 20):
        checkpoints.save(state(step), step)
    checkpoints.finish()
    assert news(checkpoints)[1] == []
    assert equal(newest(url), state(20))
    found = {name: target.get(name) for name in target.names()}
    assert {name: found.pop(name) for name in own} == own
    assert set(found) == {"step-000000015.pt", "step-00000020.pt"}
    again = Checkpoints(url, keep=2)  # a resumed one takes over what it finds
    again.check(20)
    write(again, 25, 25)
    assert set(target.names()) - set(own) == {"step-00000020.pt", "step-00000025.pt"}


def test_overwriting_removes_complete_ones_of_another_training_and_nothing_else(url: str) -> None:
    old = Checkpoints(url, keep=9)
    for step in (5, 10, 20):
        write(old, step, step)
    target = Target(url)
    own = {
        "step-00000007.pt": b"mine",
        "notes.txt": b"mine",
        "best.pt": target.get("step-00000020.pt"),
    }
    for name, data in own.items():
        target.put(name, data)
    new = Checkpoints(url, keep=2)
    new.check(0, overwrite=True)
    assert equal(Checkpoints(url).load("step-00000010.pt"), state(10))  # until there is a new one
    target.put("step-00000020.pt", b"another program's by now")
    write(new, 105, 5)  # of a name that an old one has
    write(new, 106, 6)
    own |= {"step-00000020.pt": b"another program's by now"}
    found = {name: target.get(name) for name in target.names()}
    assert {name: found.pop(name) for name in own} == own
    assert set(found) == {"step-00000005.pt", "step-00000006.pt"}
    assert equal(new.load("step-00000005.pt"), state(105))


def test_a_first_checkpoint_that_cannot_be_written_leaves_those_it_would_replace(
    tmp_path: Path,
) -> None:
    write(Checkpoints(str(tmp_path)), 9, 9)
    new = Checkpoints(str(tmp_path))
    new.check(0, overwrite=True)
    new.save({"not": object}, 3)
    new.save(state(3), 9, why_not=lambda: "the device had not computed it")
    new.finish()
    assert len(news(new)[1]) == 2
    assert equal(newest(tmp_path), state(9))


class Runs:
    """Code in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
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


NO_CHECKPOINTS: dict[str, Callable[[], bytes]] = {
    "a pickle": lambda: pickle.dumps(Runs()),
    "code": lambda: saved({"format": 1, "x": Runs()}),
    "older format": lambda: saved(Runs(), _use_new_zipfile_serialization=False),
    "list": lambda: saved([1, 2]),
    "no data.pkl": lambda: zipped({"a/b": b"c"}),
    "control characters": lambda: zipped({"a/data.pkl": b"c\x1b[2J\nboom\n."}),
    "compressed": lambda: deflated(saved({"zeros": torch.zeros(2**24)})),
    "hidden behind others": lambda: saved({}) + deflated(saved({"zeros": torch.zeros(2**24)})),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_marked_but_no_checkpoint_is_neither_run_nor_unpacked(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "step-00000009.pt"
    (tmp_path / name).write_bytes(NO_CHECKPOINTS[kind]() + _MARK)
    checkpoints = Checkpoints(str(tmp_path))
    with only_our_errors():
        assert checkpoints.load_newest() is None
        assert checkpoints.passed_over == [name]
        checkpoints.load(name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_state_that_cannot_be_saved_is_said(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save({"lock": threading.Lock()}, 1)
    write(checkpoints, 1, 2)
    written, (failed,) = news(checkpoints)
    assert (written, failed.kind) == ([2], "cannot save")
    assert "step-00000001.pt" in str(failed)


@pytest.mark.long
@pytest.mark.parametrize(
    "url",
    [
        "s3://someone:canary@bucket/run",  # botocore's error quotes the "bucket"
        "ftp://someone:canary@127.0.0.1:9/run",
        "nothing://bucket/run?token=canary",
    ],
)
def test_no_password_of_a_url_is_shown(url: str) -> None:
    one = f"{url}/step-00000001.pt" if "?" not in url else "nothing://bucket/a.pt?token=canary"
    folder, _, name = one.rpartition("/")
    for act in (Checkpoints(url).check, lambda: Checkpoints(folder).load(name)):
        with pytest.raises(GpuPoolError) as caught:
            act()
        assert "canary" not in str(caught.value)
    options = TrainingOptions(checkpoint=url, resume=one, profile=Profile(url=url))
    assert "canary" not in f"{options} {changed(options)}"
    wrong: list[dict[str, Any]] = [{"checkpoint": [url]}, {"profile": url}]
    for values in wrong:
        with pytest.raises(OptionsError) as refused:
            TrainingOptions(**values)
        assert "canary" not in str(refused.value)


def test_overwriting_leaves_links_and_what_they_lead_to(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    write(Checkpoints(str(elsewhere)), 9, 9)
    folder.mkdir()
    (folder / "step-00000009.pt").symlink_to(elsewhere / "step-00000009.pt")
    (folder / "step-00000003.pt").symlink_to(elsewhere / "step-00000009.pt")
    new = Checkpoints(str(folder))
    new.check(0, overwrite=True)
    write(new, 3, 3)
    assert len([path for path in folder.iterdir() if path.is_symlink()]) == 2
    assert equal(new.load("step-000000003.pt"), state(3))
    assert equal(newest(elsewhere), state(9))


def test_two_trainings_in_one_folder_at_one_time_lose_nothing(tmp_path: Path) -> None:
    trainings = [Checkpoints(str(tmp_path), keep=2) for _ in range(2)]
    for one in trainings:
        one.check()

    def train(number: int) -> list[Any]:
        for step in range(1, 31):
            trainings[number].save(state(number), step)
        trainings[number].finish()
        written = [one.url for one in trainings[number].news()]
        assert len(written) == 30
        return [trainings[number].load(Path(url).name) for url in written[-2:]]

    with ThreadPoolExecutor(2) as threads:
        kept = list(threads.map(train, range(2)))
    assert all(equal(one, state(number)) for number in range(2) for one in kept[number])
    assert len(list(tmp_path.iterdir())) == 4
