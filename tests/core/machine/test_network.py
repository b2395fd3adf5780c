"""Where hosts reach each other: the choice among addresses, and where this machine listens."""

from __future__ import annotations

from gpupool.core.errors import PoolStartError
from gpupool.core.machine.network import choose, listen, reach
from tests.support.raising import raises

TWO = {f"gpu{i}": [("eth0", f"10.0.0.{i}", 7), ("ib0", f"10.1.0.{i}", 8)] for i in (1, 2)}
REFUSED = {"10.0.0.2": "connection refused"}
NOWHERE = {**REFUSED, "10.1.0.2": "timed out"}


def test_the_first_address_is_chosen_that_all_others_reach_or_why_not_is_said() -> None:
    for failed, chosen in (
        ({}, ("eth0", "10.0.0.2")),
        ({"gpu1": {"gpu2": REFUSED}}, ("ib0", "10.1.0.2")),
        ({"gpu2": {"gpu1": NOWHERE}}, ("eth0", "10.0.0.2")),  # is about addresses of another one
    ):
        assert choose(TWO, failed) == {"gpu1": ("eth0", "10.0.0.1"), "gpu2": chosen}
    shown = ("gpu1", "gpu2", "10.0.0.2: connection refused", "10.1.0.2: timed out", "network=")
    with raises(PoolStartError, shown):
        choose(TWO, {"gpu1": {"gpu2": NOWHERE}})
    with raises(PoolStartError, "gpu2"):
        choose({**TWO, "gpu2": []}, {})


def test_the_network_is_the_one_named() -> None:
    (listener,), (at,) = listen("127.0.0.0/8")
    with listener:
        assert at == ("lo", *listener.getsockname())
        assert reach({"here": [at]}) == {}
    assert listen("198.18.7.0/24") == ([], [])
