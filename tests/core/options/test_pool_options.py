"""Defaults, and the sentence for every wrong value."""

from __future__ import annotations

from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import parse_duration_s
from gpupool.core.options.pool_options import PoolOptions, parse_ranks
from tests.support.raising import raises


def test_a_wrong_pool_option_is_refused() -> None:
    for name, wrong in {
        "n": [0, 1.5],
        "device": ["tpu"],
        "backend": ["mpi"],
        "timeout_s": [0],
        "on_hang": ["kill"],
        "hang_after_s": [0, float("nan")],
        "hosts": [("a",)],  # which the profile "local" does not have
        "words": [("-p", "gpu")],
    }.items():
        for value in wrong:
            with raises(OptionsError, name):
                PoolOptions(**{name: value})  # type: ignore[arg-type]
    values: dict[str, Any]
    for values in (
        {"device": "cpu", "gpus": ("0",)},
        {"device": "cpu", "force": True},
        {"device": "cpu", "backend": "nccl"},
        {"profile": "slurm", "gpus": ("0",)},
    ):
        with raises(OptionsError, *values):
            PoolOptions(**values)
    with raises(OptionsError, "soon"):
        PoolOptions(idle_timeout="soon")
    assert PoolOptions(idle_timeout="2h", hang_after_s=float("inf")).idle_timeout_s == 7200.0


def test_a_duration_in_seconds() -> None:
    times = {"90s": 90.0, " 2h ": 7200.0, "1d": 86400.0, "1.5m": 90.0, "7": 7.0, 0.5: 0.5}
    for text, seconds in {**times, "never": None, None: None}.items():
        assert parse_duration_s(text) == seconds
    for wrong in ("", "0s", "-5", "5 minutes", "m", "1h30m", "inf"):
        with raises(OptionsError):
            parse_duration_s(wrong)


def test_ranks_of_a_text_in_a_pool_of_four() -> None:
    every = (0, 1, 2, 3)
    parts = {"-1": (3,), "2,0": (0, 2), "2:": (2, 3), ":-1": (0, 1, 2), " 1 , 1 ": (1,)}
    mixed = {"all": every, "0:99": every, "::-1": every, "0:2,-1": (0, 1, 3), "1::2": (1, 3)}
    for text, ranks in {**parts, **mixed}.items():
        assert parse_ranks(text, 4) == ranks
    for wrong in ("", "4", "-5", "a", "0,", "4:", "3:1", "::0", "0:1:2:3", "0.5"):
        with raises(OptionsError, "ranks", " 0 to 3."):
            parse_ranks(wrong, 4)
