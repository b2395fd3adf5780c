"""Defaults, and the sentence for every wrong value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import parse_duration_s
from gpupool.core.options.pool_options import PoolOptions, parse_ranks
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
        ({"hosts": ("a",)}, {"hosts", "local"}),
        ({"words": ("-p", "gpu")}, {"words", "local"}),
        ({"profile": "slurm", "gpus": ("0",)}, {"slurm", "gpus"}),
        ({"device": "tpu"}, {"device"}),
        ({"backend": "mpi"}, {"backend"}),
        ({"n": 0}, {"n"}),
        ({"n": 1.5}, {"n"}),
        ({"timeout_s": 0}, {"timeout_s"}),
        ({"on_hang": "kill"}, {"on_hang"}),
        ({"hang_after_s": 0}, {"hang_after_s"}),
        ({"hang_after_s": float("nan")}, {"hang_after_s"}),
        ({"device": "cpu", "gpus": ("0",)}, {"device", "gpus"}),
        ({"device": "cpu", "force": True}, {"device", "force"}),
        ({"device": "cpu", "backend": "nccl"}, {"backend"}),
        ({"idle_timeout": "soon"}, set()),
    ],
)
def test_a_wrong_pool_option_is_refused(values: dict[str, Any], names: set[str]) -> None:
    with raises(OptionsError, *names):
        PoolOptions(**values)


def test_an_unknown_name_is_answered_with_the_right_one() -> None:
    for name, answer in {
        "idle_timout": "idle_timeout",
        "devices": "device",
        "m": "n, hosts",
    }.items():
        with raises(OptionsError, name, answer):
            PoolOptions(**{name: 1})  # type: ignore[arg-type]


def test_a_duration_in_seconds() -> None:
    times = {"90s": 90.0, " 2h ": 7200.0, "1d": 86400.0, "1.5m": 90.0, "7": 7.0, 0.5: 0.5}
    for text, seconds in {**times, "never": None, None: None}.items():
        assert parse_duration_s(text) == seconds
    for wrong in ("", "0s", "-5", "5 minutes", "m", "1h30m", "inf"):
        with raises(OptionsError):
            parse_duration_s(wrong)


def test_ranks_of_a_text_in_a_pool_of_four() -> None:
    for text, ranks in {
        "all": (0, 1, 2, 3),
        "-1": (3,),
        "2,0": (0, 2),
        "2:": (2, 3),
        ":-1": (0, 1, 2),
        "0:99": (0, 1, 2, 3),
        " 1 , 1 ": (1,),
        "0:2,-1": (0, 1, 3),
        "1::2": (1, 3),
        "::-1": (0, 1, 2, 3),
    }.items():
        assert parse_ranks(text, 4) == ranks
    for wrong in ("", "4", "-5", "a", "0,", "4:", "3:1", "::0", "0:1:2:3", "0.5"):
        with raises(OptionsError, "ranks", " 0 to 3."):
            parse_ranks(wrong, 4)


@given(st.text(alphabet="0123456789:,- al", max_size=8), st.integers(1, 9))
def test_any_text_is_ranks_of_the_pool_or_refused(text: str, size: int) -> None:
    try:
        ranks = parse_ranks(text, size)
    except OptionsError:
        return
    assert ranks
    assert list(ranks) == sorted(set(ranks))
    assert set(ranks) <= set(range(size))
