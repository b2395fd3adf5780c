"""Records on disk: written and read by many processes, whole or not at all, within a limit."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.data.cache.records import ENTRY, Records, key_of
from gpupool.data.cache.writer import Stored, Writer, _OpenPair, pair_bytes, to_remove

LIMIT = 64 << 20
MIB = 1 << 20


def content(number: int) -> bytes:
    """What record `number` holds: 2 to 40 KB, different in every place."""
    return number.to_bytes(4, "little") * (500 + number * 97 % 9500)


# Writes records as fast as it can, and tells which; not so many that they reach the limit, should
# it be a while until it is killed.
FILL = f"""
import sys
from pathlib import Path
from gpupool.data.cache.records import key_of
from gpupool.data.cache.writer import Writer
{inspect.getsource(content)}
writer = Writer(Path(sys.argv[1]))
first = int(sys.argv[2])
for number in range(first, first + 500):
    assert writer.write(key_of("record", number), content(number), {LIMIT})
    print(number, flush=True)
sys.stdin.read()
"""
# Reads one record after the other as soon as it is there, until it is told the last one.
READ = f"""
import sys, threading, time
from pathlib import Path
from gpupool.data.cache.records import Records, key_of
{inspect.getsource(content)}
records, last = Records(Path(sys.argv[1])), []
threading.Thread(target=lambda: last.append(int(sys.stdin.readline() or -1)), daemon=True).start()
seen = 0
while not last or seen <= last[0]:
    records.refresh()
    data = records.find(key_of("record", seen))
    if data is None:
        time.sleep(0.001)
        continue
    assert data == content(seen), seen
    seen += 1
print(seen)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Clock:
    """Seconds since the epoch that only the test moves on."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def find(folder: Path, *parts: object) -> bytes | None:
    """What another process would find."""
    records = Records(folder)
    records.refresh()
    return records.find(key_of(*parts))


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_what_is_written_is_found_by_all_who_look(folder: Path) -> None:
    early = Records(folder)
    early.refresh()
    writer = Writer(folder)
    for number in range(3000):
        assert writer.write(key_of("record", number), content(number)[:100], LIMIT)
    assert early.find(key_of("record", 7)) is None
    early.refresh()
    late = Records(folder)
    late.refresh()
    for records in (early, late):
        assert records.count() == (3000, 300_000)
        for number in range(3000):
            assert records.find(key_of("record", number)) == content(number)[:100]
        assert not records.knows(key_of("record", 3000))


def test_many_records_are_found_among_many_and_the_last_of_a_key_counts(folder: Path) -> None:
    writer, records = Writer(folder), Records(folder)
    for number in range(25_000):
        writer.write(key_of(number), b"old" if number < 10 else b"", LIMIT)
        if number % 5000 == 0:
            records.refresh()
    for number in range(10):
        writer.write(key_of(number), b"new", LIMIT)
    records.refresh()
    assert {records.find(key_of(number)) for number in range(10)} == {b"new"}
    assert all(records.knows(key_of(number)) for number in range(25_000))
    assert not any(records.knows(key_of(number)) for number in range(25_000, 26_000))


def test_several_writers_each_have_files_of_their_own(folder: Path) -> None:
    writers = [Writer(folder) for _ in range(3)]
    for number in range(60):
        writers[number % 3].write(key_of("record", number), content(number), LIMIT)
    assert len(list(folder.glob("*.index"))) == 3
    assert all(find(folder, "record", number) == content(number) for number in range(60))


def test_a_process_goes_on_with_what_another_has_left(folder: Path) -> None:
    for part in range(5):
        writer = Writer(folder)
        writer.write(key_of("record", part), content(part), LIMIT)
        writer.close_files()
    assert len(list(folder.glob("*.index"))) == 1
    assert all(find(folder, "record", number) == content(number) for number in range(5))


def test_a_writer_that_is_killed_leaves_whole_records_and_readers_go_on(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    reader = stack.enter_context(start(READ, folder))
    for _ in range(3):
        known = Records(folder)
        known.refresh()
        first = known.count()[0]
        filler = stack.enter_context(start(FILL, folder, first))
        assert filler.stdout is not None
        told = [int(filler.stdout.readline()) for _ in range(150)][-1]
        filler.send_signal(signal.SIGKILL)
        told = max([told, *map(int, filler.stdout.read().split())])
        filler.wait()
        known.refresh()
        count = known.count()[0]
        assert told + 1 <= count <= told + 2  # it may not have come to telling the last one
        for number in range(count):
            assert known.find(key_of("record", number)) == content(number)
    output, _ = reader.communicate(f"{count - 1}\n", timeout=60)
    assert (int(output), reader.returncode) == (count, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def nonsense(path: Path) -> None:
    path.write_bytes(b"\xff" * 4 * ENTRY.itemsize)


@pytest.mark.parametrize(
    ("ending", "damage"), [("data", flip), ("data", cut), ("index", cut), ("index", nonsense)]
)
def test_what_is_damaged_is_not_served(
    folder: Path, ending: str, damage: Callable[[Path], None]
) -> None:
    writer = Writer(folder)
    writer.write(key_of("record", 1), content(1), LIMIT)
    writer.close_files()
    (file,) = folder.glob(f"*.{ending}")
    damage(file)
    assert find(folder, "record", 1) is None
    writer.write(key_of("record", 1), content(1), LIMIT)
    assert find(folder, "record", 1) == content(1)


def test_all_records_together_keep_to_the_limit(folder: Path) -> None:
    clock = Clock()
    writer, records = Writer(folder, clock=clock), Records(folder, clock=clock)
    for number in range(100):
        clock.now += 60
        assert writer.write(key_of("record", number), bytes([number]) * (3 * MIB // 4), LIMIT)
        assert disk_bytes(folder) <= LIMIT
        records.refresh()
        assert records.find(key_of("record", 0)) is not None  # so it is in use
    found = [number for number in range(100) if find(folder, "record", number) is not None]
    oldest = found[1]
    assert found == [0, *range(oldest, 100)]
    assert disk_bytes(folder) > LIMIT * 0.9


def test_what_is_in_use_is_not_removed_for_what_is_new(folder: Path) -> None:
    clock = Clock()
    writer = Writer(folder, clock=clock)
    took = [writer.write(key_of(number), bytes(MIB), LIMIT) for number in range(100)]
    kept = took.index(False)
    assert took == [True] * kept + [False] * (100 - kept)
    assert LIMIT * 0.9 < disk_bytes(folder) <= LIMIT
    assert find(folder, 0) == bytes(MIB)
    clock.now = time.time() + 301
    assert writer.write(key_of(100), bytes(MIB), LIMIT)
    assert find(folder, 1) is None
    assert find(folder, 0) == bytes(MIB)  # which has been used since


def test_a_record_too_large_for_the_limit_is_left_out(folder: Path) -> None:
    writer = Writer(folder)
    assert not writer.write(key_of(1), bytes(LIMIT // 4 + 1), LIMIT)
    assert writer.write(key_of(2), bytes(LIMIT // 4), LIMIT)
    assert find(folder, 2) == bytes(LIMIT // 4)


def test_a_writer_whose_files_were_removed_makes_new_ones(folder: Path) -> None:
    clock = Clock()
    idle, busy = Writer(folder, clock=clock), Writer(folder, clock=clock)
    assert idle.write(key_of("idle", 1), content(1), LIMIT)
    for number in range(80):
        clock.now += 100
        assert busy.write(key_of("busy", number), bytes(MIB), LIMIT)
    assert find(folder, "idle", 1) is None
    assert idle.write(key_of("idle", 2), content(2), LIMIT)
    assert find(folder, "idle", 2) == content(2)


def test_what_another_has_just_finished_is_not_taken_over(folder: Path) -> None:
    """It was listed as one to go on with, and finished before it could be opened."""
    assert Writer(folder).write(key_of(1), b"x", LIMIT)
    (index,) = folder.glob("*.index")
    assert _OpenPair.take_over(folder, index.stem) is None  # being written to
    mine = _OpenPair.create(folder, 0.0)
    (name,) = {path.stem for path in folder.glob("*.index")} - {index.stem}
    mine.finish()
    mine.close()
    assert _OpenPair.take_over(folder, name) is None
    assert _OpenPair.take_over(folder, "removed") is None


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(folder: Path) -> None:
    clock = Clock()
    assert Writer(folder, clock=clock).write(key_of("ahead"), bytes(MIB), LIMIT)
    (index,) = folder.glob("*.index")
    os.utime(index, (clock.now + 1e6, clock.now + 1e6))
    writer = Writer(folder, clock=clock)
    for number in range(80):
        clock.now += 10
        writer.write(key_of("new", number), bytes(MIB), LIMIT)
    assert not index.exists()


def test_data_without_an_index_is_cleared_away(folder: Path) -> None:
    (folder / "lost.data").write_bytes(bytes(MIB))
    Writer(folder).write(key_of(1), b"x", LIMIT)
    assert not (folder / "lost.data").exists()


@given(
    st.lists(st.tuples(st.integers(0, 2 * MIB), st.integers(0, 100), st.booleans()), max_size=30),
    st.integers(MIB, 20 * MIB),
    st.integers(-MIB, 20 * MIB),
    st.integers(0, 100),
)
def test_room_is_made_from_what_was_used_longest_ago(
    sizes: list[tuple[int, int, bool]], limit: int, free: int, idle_since: int
) -> None:
    pairs = [Stored(str(i), size, used, done) for i, (size, used, done) in enumerate(sizes)]
    removed = to_remove(pairs, MIB, limit, free, idle_since)
    idle = sorted((pair for pair in pairs if pair.used_at <= idle_since), key=lambda p: p.used_at)

    def fits(gone: list[Stored]) -> bool:
        left = sum(pair.charge(pair_bytes(limit)) for pair in pairs if pair not in gone)
        return left + MIB <= limit and free + sum(pair.num_bytes for pair in gone) >= MIB

    if removed is None:
        assert not fits(idle)
    else:
        assert removed == idle[: len(removed)]
        assert fits(removed)
        assert not removed or not fits(removed[:-1])
