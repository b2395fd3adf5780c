"""Defaults, and the sentence for every wrong value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.core.options.pool_options import (
    PoolOptions,
    make_options,
    parse_duration_s,
    parse_ranks,
)
from tests.support.raising import raises


def test_the_defaults_of_a_pool() -> None:
    options = PoolOptions()
    assert (options.profile, options.n, options.gpus) == ("local", None, None)
    assert (options.device, options.backend, options.env) == ("auto", "auto", ())
    assert (options.idle_timeout_s, options.timeout_s) == (1800.0, 60.0)
    assert (options.on_hang, options.hang_after_s) == ("tell", 30.0)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"profile": ""}, {"profile"}),
        ({"profile": 3}, {"profile"}),
        ({"hosts": ("a",)}, {"hosts", "local"}),
        ({"words": ("-p", "gpu")}, {"words", "local"}),
        ({"profile": "slurm", "gpus": ("0",)}, {"slurm", "gpus"}),
        ({"device": "tpu"}, {"device"}),
        ({"backend": "mpi"}, {"backend"}),
        ({"n": 0}, {"n"}),
        ({"n": 1.5}, {"n"}),
        ({"n": "two"}, {"n"}),
        ({"timeout_s": 0}, {"timeout_s"}),
        ({"timeout_s": "1m"}, {"timeout_s"}),
        ({"on_hang": "kill"}, {"on_hang"}),
        ({"hang_after_s": 0}, {"hang_after_s"}),
        ({"hang_after_s": float("nan")}, {"hang_after_s"}),
        ({"hang_after_s": "30s"}, {"hang_after_s"}),
        ({"device": "cpu", "gpus": ("0",)}, {"device", "gpus"}),
        ({"device": "cpu", "force": True}, {"device", "force"}),
        ({"device": "cpu", "backend": "nccl"}, {"backend"}),
        ({"idle_timeout": "soon"}, set()),
    ],
)
def test_a_wrong_pool_option_is_refused(values: dict[str, Any], names: set[str]) -> None:
    with raises(OptionsError, *names):
        PoolOptions(**values)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("idle_timout", " 'idle_timeout'?"),
        ("devices", " 'device'?"),
        ("xyzzy", " profile, n, hosts, words, "),
    ],
)
def test_an_unknown_name_is_answered_with_the_right_one(name: str, answer: str) -> None:
    with raises(OptionsError, name) as caught:
        make_options(PoolOptions, {name: 1})
    assert answer in str(caught.value)


def test_known_names_make_the_options() -> None:
    assert make_options(PoolOptions, {"n": 3}) == PoolOptions(n=3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("30m", 1800.0),
        (" 2h ", 7200.0),
        ("1d", 86400.0),
        ("1.5m", 90.0),
        ("7", 7.0),
        (7, 7.0),
        (0.5, 0.5),
        ("never", None),
        (None, None),
    ],
)
def test_a_duration_in_seconds(text: str | float | None, seconds: float | None) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "5 minutes", "m", "1h30m", "inf"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with raises(OptionsError):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", (0, 1, 2, 3)),
        ("0", (0,)),
        ("-1", (3,)),
        ("2,0", (0, 2)),
        ("0:2", (0, 1)),
        ("2:", (2, 3)),
        (":-1", (0, 1, 2)),
        ("0:99", (0, 1, 2, 3)),
        (" 1 , 1 ", (1,)),
        ("0:2,-1", (0, 1, 3)),
        ("::2", (0, 2)),
        ("1::2", (1, 3)),
        ("::-1", (0, 1, 2, 3)),
    ],
)
def test_ranks_of_a_text_in_a_pool_of_four(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("text", ["", "4", "-5", "a", "0,", "4:", "3:1", "::0", "0:1:2:3", "0.5"])
def test_ranks_that_are_not_there_are_answered_with_those_that_are(text: str) -> None:
    with raises(OptionsError, "ranks") as caught:
        parse_ranks(text, 4)
    assert str(caught.value).endswith(" 0 to 3.")


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_any_set_of_ranks_can_be_written(pool: tuple[int, set[int]]) -> None:
    size, chosen = pool
    if chosen:
        forwards = ",".join(map(str, chosen))
        from_the_end = ",".join(str(rank - size) for rank in chosen)
        assert parse_ranks(forwards, size) == tuple(sorted(chosen))
        assert parse_ranks(from_the_end, size) == tuple(sorted(chosen))


@given(st.text(alphabet="0123456789:,- al", max_size=8), st.integers(1, 9))
def test_any_text_is_ranks_of_the_pool_or_refused(text: str, size: int) -> None:
    try:
        ranks = parse_ranks(text, size)
    except OptionsError:
        return
    assert ranks
    assert list(ranks) == sorted(set(ranks))
    assert set(ranks) <= set(range(size))
