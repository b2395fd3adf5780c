"""Which ranks train, on what, and why the others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupool.core.errors import OptionsError
from gpupool.core.machine.topology import Gpu, Rank, place, training_ranks
from gpupool.core.options.checks import WORDS
from gpupool.core.options.training_ranks import choose_execution
from tests.support.raising import raises

NO_GPU = "has no GPU of its own"


def ranks_of(num_gpus: int, num_ranks: int) -> tuple[Rank, ...]:
    gpus = [Gpu(i, f"GPU-{i}", "H200") for i in range(num_gpus)]
    return place(gpus, num_ranks, num_cores=8)


@pytest.mark.parametrize(
    ("execution", "on_cpus", "on_gpus", "why_idle"),
    [
        ("auto", ((0, 1, 2), False), ((0, 1), True), NO_GPU),
        ("parallel-auto", ((0, 1, 2), False), ((0, 1), True), NO_GPU),
        ("cpu", ((0,), False), ((0,), False), "execution='cpu' trains on one rank"),
        ("parallel-cpu", ((0, 1, 2), False), ((0, 1, 2), False), ""),
        ("gpu", None, ((0,), True), "execution='gpu' trains on one rank"),
        ("multi-gpu", None, ((0, 1), True), NO_GPU),
        ("parallel-gpu", None, ((0, 1), True), NO_GPU),
    ],
)
def test_who_trains_in_a_pool_of_three_with_no_gpu_and_with_two(
    execution: str,
    on_cpus: tuple[tuple[int, ...], bool] | None,
    on_gpus: tuple[tuple[int, ...], bool],
    why_idle: str,
) -> None:
    for num_gpus, expected in ((0, on_cpus), (2, on_gpus)):
        ranks = ranks_of(num_gpus, 3)
        if expected is None:
            with raises(OptionsError, "no GPU", "execution") as caught:
                choose_execution(execution, ranks, training_ranks(ranks), "no NVIDIA driver")
            assert " 3 ranks " in str(caught.value)
            assert " (no NVIDIA driver); " in str(caught.value)
            continue
        chosen = choose_execution(execution, ranks, training_ranks(ranks))
        assert (chosen.ranks, chosen.on_gpu) == expected
        assert chosen.idle == {i: why_idle for i in range(3) if i not in chosen.ranks}


def test_every_word_of_the_option_is_known_here() -> None:
    ranks = ranks_of(1, 2)
    for execution in WORDS["execution"]:
        assert choose_execution(execution, ranks, training_ranks(ranks)).ranks


def test_the_gpus_of_two_machines_are_not_those_of_one() -> None:
    ranks = [replace(rank, node_rank=rank.rank) for rank in ranks_of(2, 2)]
    with raises(OptionsError, "several hosts", "execution"):
        choose_execution("multi-gpu", ranks, (0, 1))
    assert choose_execution("parallel-gpu", ranks, (0, 1)).ranks == (0, 1)
