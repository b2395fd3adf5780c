"""Where hosts reach each other: the choice among addresses, and real sockets of this machine."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from gpupool.core.errors import PoolStartError
from gpupool.core.machine.network import choose, listen, reach
from tests.support.raising import raises

FIRST, SECOND = ("eth0", "10.0.0.{}", 7), ("ib0", "10.1.0.{}", 8)
TWO = {
    f"gpu{i}": [(name, at.format(i), port) for name, at, port in (FIRST, SECOND)] for i in (1, 2)
}
REFUSED = {"10.0.0.2": "connection refused"}
NOWHERE = {**REFUSED, "10.1.0.2": "timed out"}


@pytest.mark.parametrize(
    ("failed", "chosen"),
    [
        ({}, ("eth0", "10.0.0.2")),
        ({"gpu1": {"gpu2": REFUSED}}, ("ib0", "10.1.0.2")),
        ({"gpu2": {"gpu1": NOWHERE}}, ("eth0", "10.0.0.2")),  # is about addresses of another one
    ],
)
def test_the_first_address_is_chosen_that_all_others_reach(failed: Any, chosen: Any) -> None:
    assert choose(TWO, failed) == {"gpu1": ("eth0", "10.0.0.1"), "gpu2": chosen}


def test_a_pair_that_cannot_connect_is_named_with_its_addresses_and_why() -> None:
    shown = ("gpu1", "gpu2", "10.0.0.2: connection refused", "10.1.0.2: timed out", "network=")
    with raises(PoolStartError, shown):
        choose(TWO, {"gpu1": {"gpu2": NOWHERE}})
    with raises(PoolStartError, "gpu2"):
        choose({**TWO, "gpu2": []}, {})


def test_hosts_are_reached_where_they_listen_and_it_is_said_why_not() -> None:
    with contextlib.ExitStack() as held:
        listeners, listened = listen()
        for one in listeners:
            held.enter_context(one)
        assert listeners
        free, full = (held.enter_context(socket.socket()) for _ in range(2))
        free.bind(("127.0.0.1", 0))
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        for _ in range(2):  # the kernel answers nobody any more
            trying = held.enter_context(socket.socket())
            trying.setblocking(False)
            trying.connect_ex(full.getsockname())
        there = [("", *one.getsockname()) for one in (free, full)]
        failed = reach({"here": listened, "there": there}, 0.3)
    assert failed == {"there": {"127.0.0.1": "connection refused", "127.0.0.2": "timed out"}}


def test_the_network_is_the_one_named() -> None:
    (listener,), (at,) = listen("127.0.0.0/8")
    with listener:
        assert at == ("lo", *listener.getsockname())
    assert listen("198.18.7.0/24") == ([], [])
