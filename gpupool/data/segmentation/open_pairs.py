"""Pairs of image and mask that a process has open: read once, decoded once, by any of its threads.

Runs anywhere; no torch. A pair is open from the first patch that is asked of it to the last one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class OpenPair:
    """One pair, on its way from the store to pixels: `raw`, then `decoded`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.raw: Future[Any] = Future()
        self.decoded: Future[Any] = Future()
        self.num_used = 0
        # Never released: a flag that only one thread can set.
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Whether the caller is to decode it: true for one caller."""
        return self._claim.acquire(blocking=False)


class OpenPairs:
    """The open pairs of this process, by number; `read(number)` and `decode(number, raw)` make one.

    `num_uses` is how often each is used: after that it is closed. Of those that are used less
    often, `capacity` stay open, the last used ones. Pickles without its pairs.
    """

    def __init__(
        self,
        capacity: int,
        num_uses: int,
        read: Callable[[int], Any],
        decode: Callable[[int, Any], Any],
    ) -> None:
        self._arguments = (capacity, num_uses, read, decode)
        self._capacity, self._num_uses, self._read, self._decode = self._arguments
        self._lock = threading.Lock()
        self._pairs: OrderedDict[int, OpenPair] = OrderedDict()
        self._to_decode: deque[OpenPair] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self._pairs)

    def fetch(self, number: int) -> OpenPair:
        """The pair, after it has been read; by one thread, while others that need it wait.

        Raises what `read` raises; the next call tries again.
        """
        with self._lock:
            pair = self._pairs.get(number)
            is_mine = pair is None
            if pair is None:
                pair = self._pairs[number] = OpenPair(number)
            self._pairs.move_to_end(number)
            while len(self._pairs) > self._capacity:
                # Whoever uses it keeps it; only its next patch reads it again.
                self._pairs.popitem(last=False)
        raw = pair.raw  # a fresh one once it is decoded
        if not is_mine:
            if not pair.decoded.done():
                raw.result()
            return pair
        try:
            raw.set_result(self._read(number))
        except BaseException as error:
            self._close(pair)
            raw.set_exception(error)
            raise
        self._to_decode.append(pair)
        return pair

    def decode(self, pair: OpenPair) -> Any:
        """What `decode` makes of a pair that was fetched, which it is asked for once.

        While another thread decodes it, this one decodes the next pair that has been read. Raises
        what `decode` raises.
        """
        while not pair.decoded.done():
            if pair.claim():
                self._decode_claimed(pair)
            elif (other := self._unclaimed()) is not None:
                self._decode_claimed(other)
            else:
                break
        try:
            decoded = pair.decoded.result()
        except BaseException:
            self._close(pair)
            raise
        with self._lock:
            pair.num_used += 1
            is_used_up = pair.num_used >= self._num_uses
        if is_used_up:
            self._close(pair)
        return decoded

    def _decode_claimed(self, pair: OpenPair) -> None:
        with contextlib.suppress(ValueError):  # another thread has taken it from there
            self._to_decode.remove(pair)
        try:
            pair.decoded.set_result(self._decode(pair.number, pair.raw.result()))
        except BaseException as error:
            pair.decoded.set_exception(error)
            if not isinstance(error, Exception):
                raise  # an interrupt is this thread's own
        pair.raw = Future()  # its bytes are not needed any more

    def _unclaimed(self) -> OpenPair | None:
        while self._to_decode:
            with contextlib.suppress(IndexError):
                pair = self._to_decode.popleft()
                if pair.claim():
                    return pair
        return None

    def _close(self, pair: OpenPair) -> None:
        with self._lock:
            if self._pairs.get(pair.number) is pair:
                del self._pairs[pair.number]
