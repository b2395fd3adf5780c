"""Pairs that threads share: read once, decoded once, closed after their last use."""

from __future__ import annotations

import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from operator import add

import pytest

from gpupool.data.segmentation.open_pairs import OpenPairs


def double(number: int) -> int:
    return 2 * number


class Pixels:
    """What can be watched going away."""


def test_many_threads_read_and_decode_a_pair_once() -> None:
    read: list[int] = []
    decoded: list[int] = []

    def read_one(number: int) -> int:
        read.append(number)
        return number * 10

    def decode_one(number: int, raw: int) -> int:
        decoded.append(number)
        return number + raw

    opened = OpenPairs(8, 16, read_one, decode_one)

    def use(patch: int) -> int:
        pixels: int = opened.decode(opened.fetch(patch // 16))
        return pixels

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(64))) == [11 * (patch // 16) for patch in range(64)]
    assert (sorted(read), sorted(decoded)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert len(opened) == 0


def test_a_thread_that_would_wait_decodes_the_next_pair() -> None:
    decoding, release = threading.Event(), threading.Event()
    by: dict[int, str] = {}

    def decode(number: int, raw: int) -> int:
        by[number] = threading.current_thread().name
        if number == 0:
            decoding.set()
            assert release.wait(30)
        else:
            release.set()
        return number

    opened = OpenPairs(8, 2, double, decode)
    first, second = opened.fetch(0), opened.fetch(1)
    one = threading.Thread(target=opened.decode, args=(first,), name="one")
    one.start()
    assert decoding.wait(30)
    two = threading.Thread(target=opened.decode, args=(first,), name="two")
    two.start()  # needs pair 0 as well, which only goes on once pair 1 is decoded
    for thread in (one, two):
        thread.join(30)
        assert not thread.is_alive()
    assert by == {0: "one", 1: "two"}
    assert opened.decode(second) == 1


def test_pixels_are_let_go_after_the_last_use() -> None:
    opened = OpenPairs(8, 2, double, lambda number, raw: Pixels())
    pair = opened.fetch(3)
    pixels = weakref.ref(opened.decode(pair))
    del pair
    assert pixels() is not None
    opened.decode(opened.fetch(3))
    assert (pixels(), len(opened)) == (None, 0)


def test_what_is_not_used_up_is_bounded() -> None:
    read: list[int] = []
    opened = OpenPairs(3, 9, read.append, lambda number, raw: number)
    for number in range(5):
        opened.decode(opened.fetch(number))
    assert len(opened) == 3
    opened.fetch(4)
    opened.fetch(0)
    assert read == [0, 1, 2, 3, 4, 0]


def test_errors_come_out_for_every_patch_and_are_tried_again() -> None:
    tried: list[str] = []

    def fail_to_read(number: int) -> int:
        tried.append("read")
        raise OSError("gone")

    opened = OpenPairs(3, 9, fail_to_read, add)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            opened.fetch(1)

    def fail_to_decode(number: int, raw: int) -> int:
        tried.append("decode")
        raise ValueError("damaged")

    opened = OpenPairs(3, 9, double, fail_to_decode)
    pair = opened.fetch(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="damaged"):
            opened.decode(pair)
    with pytest.raises(ValueError, match="damaged"):
        opened.decode(opened.fetch(1))
    assert tried == ["read", "read", "decode", "decode"]
    assert len(opened) == 0


def test_it_pickles_without_its_pairs() -> None:
    opened = OpenPairs(3, 9, double, add)
    opened.fetch(1)
    copy = pickle.loads(pickle.dumps(opened))
    assert len(copy) == 0
    assert copy.decode(copy.fetch(2)) == 6
