"""Mistakes that people make with `train`, and the sentence that each is answered with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpupool
from gpupool import OptionsError, Pool, PoolError, SpmdError, TrainingError, TrainingOptions
from gpupool.core.options import other_names
from tests.support.pools import Pools
from tests.support.raising import raises, same_on
from tests.support.trainings import network, samples


@pytest.fixture
def inline() -> Iterator[Pool]:
    """The pool of this "notebook", so that `gpupool.train` finds it."""
    with gpupool.start(inline=True, device="cpu") as pool:
        yield pool


# ---- arguments of train ------------------------------------------------------------------------


def test_options_are_keywords_of_train(inline: Pool) -> None:
    result = gpupool.train(network(), samples(32), epochs=2, batch_size=8, lr=0.5, progress="none")
    assert [step.lr for step in result.history.steps] == [0.5] * 8
    options = TrainingOptions(epochs=2, batch_size=16, progress="none")
    assert gpupool.train(network(), samples(32), options, epochs=1).history.num_steps == 2


def test_no_pool_starts_for_a_call_that_is_wrong() -> None:
    for arguments, keywords in (
        ((), {"epoch": 1}),
        ((), {"loss": "cross_entropie"}),
        (({"epochs": 1},), {}),
        (("mse", samples(8)), {}),
    ):
        with pytest.raises((OptionsError, TrainingError)):
            gpupool.train(network(), samples(8), *arguments, **keywords)  # type: ignore[call-overload]
    with raises(PoolError, ""):
        gpupool.current_pool()


@pytest.mark.parametrize(
    "name",
    [
        *("fsdp", "strategy", "num_workers", "devices", "gpus", "device", "accelerator"),
        *("drop_last", "dropLastBatch", "validation_data", "class_weight", "num_classes"),
        *("save_total_limit", "max_epochs", "verbose", "plots", "LearnRateDropFactor"),
    ],
)
def test_a_name_of_another_library_is_answered_in_one_sentence(name: str) -> None:
    with raises(OptionsError, "no option", name) as caught:
        gpupool.train(network(), samples(8), **{name: 1})
    assert 40 < len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("LabelSource", "'labels'"),
        ("class_names", "'classes'"),
        ("extension", "'extensions'"),
        ("IncludeSubfolders", other_names.DATASTORE_ELSEWHERE["IncludeSubfolders"]),
        ("transform", ".with_transform"),
        ("xyzzy", "storage_options"),
    ],
)
def test_a_name_that_a_datastore_has_elsewhere_is_answered(
    tmp_path: Path, name: str, shown: str
) -> None:
    with raises(OptionsError, "no option", name, shown=(shown, "ImageDatastore")):
        gpupool.ImageDatastore(str(tmp_path), **{name: 1})


# ---- on a rank ---------------------------------------------------------------------------------


def _train() -> None:
    gpupool.train(network(), samples(8), epochs=1)


def _evaluate() -> None:
    gpupool.evaluate(network(), samples(8))


def _predict() -> None:
    gpupool.predict(network(), samples(8))


def _confusion() -> None:
    gpupool.confusion(network(), samples(8))


def _start() -> None:
    gpupool.start(n=1)


@pytest.mark.parametrize("function", [_train, _evaluate, _predict, _confusion, _start])
def test_what_uses_all_ranks_is_refused_on_a_rank(
    pools: Pools, function: Callable[[], None]
) -> None:
    with raises(SpmdError, "on a rank", ename="PoolError") as caught:
        pools[2].run(function)
    assert same_on(caught.value, 0, 1)


def test_it_is_refused_in_a_cell_of_an_inline_pool(inline: Pool) -> None:
    with raises(SpmdError, "on a rank", ename="PoolError"):
        inline.run(_train)
    assert gpupool.current_pool() is inline


@pytest.mark.parametrize("line", ["%gpupool status", "%gpupool start -n 2", "%spmd 1"])
def test_the_magics_of_the_notebook_are_refused_on_a_rank(pools: Pools, line: str) -> None:
    with raises(SpmdError, "on a rank", ename="PoolError"):
        pools[2].run(line)
