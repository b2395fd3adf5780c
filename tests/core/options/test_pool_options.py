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
from gpupool.core.options.training_options import TrainingOptions


def test_the_defaults_of_a_pool() -> None:
    options = PoolOptions()
    assert (options.profile, options.n, options.gpus) == ("local", None, None)
    assert (options.device, options.backend, options.env) == ("auto", "auto", ())
    assert (options.idle_timeout_s, options.timeout_s) == (1800.0, 60.0)
    assert (options.on_hang, options.hang_after_s) == ("tell", 30.0)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"profile": "slurm"}, "profile='slurm' is unknown: choose one of local."),
        ({"device": "tpu"}, "device='tpu' is unknown: choose one of auto, cpu, gpu."),
        ({"backend": "mpi"}, "backend='mpi' is unknown: choose one of auto, nccl, gloo."),
        ({"n": 0}, "n=0: a pool needs at least one rank."),
        ({"n": 1.5}, "n=1.5: must be a whole number."),
        ({"n": "two"}, "n='two': must be a number."),
        ({"timeout_s": 0}, "timeout_s=0: must be above 0 seconds."),
        ({"timeout_s": "1m"}, "timeout_s='1m': must be a number."),
        ({"on_hang": "kill"}, "on_hang='kill' is unknown: choose one of tell, abort."),
        ({"hang_after_s": 0}, "hang_after_s=0: must be above 0 seconds."),
        ({"hang_after_s": float("nan")}, "hang_after_s=nan: must be above 0 seconds."),
        ({"hang_after_s": "30s"}, "hang_after_s='30s': must be a number."),
        (
            {"device": "cpu", "gpus": ("0",)},
            "device='cpu' and gpus= exclude each other; leave one of them out.",
        ),
        (
            {"device": "cpu", "force": True},
            "device='cpu' and force exclude each other: there is no GPU to take.",
        ),
        (
            {"device": "cpu", "backend": "nccl"},
            "backend='nccl' needs GPUs; on CPU ranks use 'gloo' or 'auto'.",
        ),
        (
            {"idle_timeout": "soon"},
            "'soon' is not a time. Write '90s', '30m', '2h' or 'never'.",
        ),
    ],
)
def test_a_wrong_pool_option_is_answered_with(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionsError) as caught:
        PoolOptions(**values)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("batchsize", "Did you mean 'batch_size'?"),
        ("epoch", "Did you mean 'epochs'?"),
        ("InitialLearnRate", "Did you mean 'lr'?"),
        ("MiniBatchSize", "Did you mean 'batch_size'?"),
        ("MaxEpochs", "Did you mean 'epochs'?"),
        ("L2Regularization", "Did you mean 'weight_decay'?"),
        ("VerboseFrequency", "Did you mean 'log_every'?"),
        ("xyzzy", "There are: optimizer, lr, momentum, "),
    ],
)
def test_an_unknown_name_is_answered_with_the_right_one(name: str, answer: str) -> None:
    with pytest.raises(OptionsError) as caught:
        make_options(TrainingOptions, {name: 1})
    assert str(caught.value).startswith(f"{name!r} is not an option. {answer}")


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
    with pytest.raises(OptionsError, match="is not a time"):
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
    with pytest.raises(OptionsError) as caught:
        parse_ranks(text, 4)
    assert str(caught.value) == (
        f"ranks {text!r}: write all, 0, 0,2, 0:4, ::2 or -1; this pool has ranks 0 to 3."
    )


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
