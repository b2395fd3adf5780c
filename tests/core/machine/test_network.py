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


def test_the_network_and_the_ports_are_those_named() -> None:
    (listener,), (at,) = listen("127.0.0.0/8")
    with listener:
        assert at == ("lo", *listener.getsockname())
        assert reach({"here": [at[1:]]}) == {}
        (other,), _ = listen("127.0.0.0/8", range(at[2], at[2] + 20))  # the first one is in use
        with other:
            assert at[2] < other.getsockname()[1] < at[2] + 20
    assert listen("198.18.7.0/24") == ([], [])
