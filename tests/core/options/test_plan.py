"""What the plan of a training says, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from gpupool import TrainingOptions
from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.machine.topology import Gpu, place, training_ranks
from gpupool.core.options.plan import TrainingPlan
from gpupool.core.options.planning import MAX_POINTS
from gpupool.pool import session
from tests.support.raising import raises


def data(num: int) -> TensorDataset:
    return TensorDataset(torch.zeros(num, 3), torch.zeros(num, dtype=torch.int64))


def gpu_pool(num_gpus: int, num_ranks: int) -> Any:
    """What a plan reads of a pool, for machines that are not here."""
    ranks = place([Gpu(i, f"GPU-{i}", "H200") for i in range(num_gpus)], num_ranks, num_cores=8)
    return SimpleNamespace(
        ranks=ranks, training_ranks=training_ranks(ranks), training_backend="nccl", why_cpu=""
    )


def said(plan: TrainingPlan) -> dict[str, str]:
    return {what: value for _, rows in plan.sections() for what, value in rows}


MODEL = nn.Sequential(nn.Linear(3, 100), nn.BatchNorm1d(100), nn.Linear(100, 10))


def test_the_papers_training_on_eight_gpus() -> None:
    """250 images and a rate of 0.00125 on one GPU become 2000 and 0.01 on eight."""
    options = TrainingOptions(
        batch_size=250,
        lr=0.00125,
        scale="linear",
        epochs=30,
        schedule="piecewise",
        drop_period=20,
        warmup="1 epoch",
        learn_rate_factors={"0.*": 0, "2.weight": 10, "2.bias": 20},
        patience=5,
        metrics=["f1"],
        objective="f1",
        checkpoint="s3://bucket/run1",
        resume="auto",
        on_failure="resume",
        accumulate=2,
        clip=1.0,
    )
    plan = options.explain(MODEL, data(50_100), data(10), pool=gpu_pool(8, 9))
    assert plan.scaled == (("batch_size", 250, 2000), ("lr", 0.00125, 0.01))
    assert (plan.steps_per_epoch, plan.num_steps, plan.last_batch) == (26, 780, 100)
    assert [rank.share for rank in plan.ranks] == [250] * 8 + [0]
    assert plan.ranks[8].why_idle == "has no GPU of its own"
    assert plan.reduced_bytes == 4 * (1010 + 200)
    assert len(plan.learning_rates) == MAX_POINTS
    assert plan.learning_rates[0] == (1, pytest.approx(0.00125))
    assert plan.learning_rates[-1] == (780, pytest.approx(0.001))
    words = said(plan)
    assert words["global batch"] == "2,000 samples (scaled from 250, times 8 ranks)"
    assert words["rate"] == "0.01 (scaled from 0.00125, times 8 ranks)"
    assert words["warm-up"] == "1 epoch, 26 steps, from 0.00125"
    assert words["all-reduced"] == "4.84 kB of gradients a step, over nccl"
    assert words["parameters"] == "1,210 train, 400 are frozen"
    assert words["keeps"] == "the best weights by f1"
    text = str(plan)
    assert text.startswith("Training on 8 ranks: 780 steps, 30 epochs")
    assert "  rank 0  GPU 0: H200  250 samples a step" in text
    assert "  rank 8  CPU  idle: has no GPU of its own" in text
    assert "  ▂" in text


def test_what_is_not_given_is_not_told() -> None:
    plan = TrainingOptions(patience=3, warmup="1 epoch").explain(pool=2)
    assert (plan.num_samples, plan.steps_per_epoch, plan.has_validation) == (None, None, None)
    assert (plan.learning_rates, plan.model, plan.reduced_bytes) == ((), None, None)
    assert "validation" not in said(plan)
    assert said(plan)["all-reduced"] == "gradients over gloo"


def test_of_a_stream_only_the_steps_that_are_asked_for_are_known() -> None:
    class Stream(IterableDataset[Any]):
        """Nobody knows how long."""

        def __iter__(self) -> Iterator[Any]:
            yield from data(9)

    plan = TrainingOptions(max_steps=70).explain(dataset=Stream(), pool=2)
    assert (plan.num_samples, plan.steps_per_epoch, plan.num_steps) == (None, None, 70)
    assert said(plan)["samples"] == "a stream: as many as it gives"
    with raises(OptionsError, "unknown length", "schedule"):
        TrainingOptions(schedule="cyclical").explain(dataset=Stream(), pool=2)


def test_of_one_rank_nothing_is_summed_and_without_a_pool_that_is_said() -> None:
    session.stop()  # one that other tests have left
    plan = TrainingOptions().explain(MODEL, data(100))
    assert plan.reduced_bytes == 0
    assert plan.notes[0].startswith("No pool runs: this is for one rank.")
    assert said(plan)["all-reduced"] == "nothing: one rank"
    assert said(plan)["keeps"] == "the last weights"
    assert "▁" not in str(plan)


def test_ranks_without_samples_say_why() -> None:
    plan = TrainingOptions(rank_load=(2, 0, 1), batch_size=9).explain(pool=3)
    assert [rank.share for rank in plan.ranks] == [6, 0, 3]
    assert plan.ranks[1].why_idle == "its rank_load is 0"
    small = TrainingOptions(batch_size=2).explain(pool=3)
    assert small.ranks[0].why_idle == "a batch has fewer samples than there are ranks"
    on_cpu = TrainingOptions(execution="cpu").explain(pool=gpu_pool(1, 2))
    assert [rank.device for rank in on_cpu.ranks] == ["CPU", "CPU"]
    assert on_cpu.ranks[1].why_idle == "execution='cpu' trains on one rank"


@pytest.mark.parametrize(
    ("values", "arguments", "kind", "name", "shown"),
    [
        ({"patience": 3}, {"dataset": data(9)}, "no effect", "patience", ""),
        ({"execution": "gpu"}, {"pool": 2}, "no GPU", "execution", " 2 ranks "),
        ({"rank_load": (1, 1)}, {"pool": 3}, "length", "rank_load", " 2 shares, "),
        ({"batch_norm": "sync"}, {"model": nn.Linear(2, 2)}, "no effect", "batch_norm", ""),
        (
            {"learn_rate_factors": {"x": 1}},
            {"model": MODEL},
            "no parameter",
            "learn_rate_factors",
            " 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias.",
        ),
        (
            {"weight_decay_factors": {"x": 1}, "weight_decay": 0.1},
            {"model": MODEL},
            "no parameter",
            "weight_decay_factors",
            "'x'",
        ),
        ({}, {"pool": "local"}, "type", "pool", ""),
        ({}, {"pool": 0}, "range", "pool", ""),
    ],
)
def test_what_train_would_refuse_is_refused(
    values: dict[str, Any], arguments: dict[str, Any], kind: str, name: str, shown: str
) -> None:
    with raises(OptionsError, kind, name) as caught:
        TrainingOptions(**values).explain(**arguments)
    assert shown in str(caught.value)


def test_a_lazy_model_has_to_be_called_first() -> None:
    """What the check goes by: torch's name for a parameter without a shape."""
    model = nn.Sequential(nn.LazyLinear(2))
    assert type(model[0].weight).__name__ == "UninitializedParameter"
    with raises(TrainingError, "lazy", "0.weight"):
        TrainingOptions().explain(model)
    model(torch.zeros(1, 3))
    assert TrainingOptions().explain(model).model is not None


CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"schedule": "cosine"}, "schedule", "cosine"),
    (
        {"schedule": [("cosine", 1), ("none", 9)]},
        "schedule",
        "cosine for 1 epoch, then none for 9 epochs",
    ),
    ({"schedule": lambda step, epoch: 1.0}, "schedule", "<lambda>"),
    ({"optimizer": "adamw", "weight_decay": 0.1}, "optimizer", "adamw, weight decay 0.1"),
    ({"warmup": 7}, "warm-up", "7 steps, from 0.001"),
    ({"warmup": "2 epochs"}, "warm-up", "2 epochs, 16 steps, from 0.001"),
    ({"precision": "bf16"}, "precision", "bf16"),
    ({"clip": 2}, "gradient", "norm at most 2"),
    ({"batch_norm": "sync"}, "batch norm", "of the whole batch"),
    ({"ema": 0.5}, "averaged weights", "decay 0.5; validated and kept"),
    ({"accumulate": 3}, "computed in", "3 parts on each rank"),
    ({"shuffle": "never", "seed": 3}, "order", "as given"),
    ({"shuffle": "once", "seed": 3}, "order", "shuffled once (seed 3)"),
    ({"weights": "balanced"}, "samples of an epoch", "drawn by their weights, with replacement"),
    ({"bucket_by": lambda index: index}, "samples of a batch", "of similar length"),
    ({"batch_sampler": [[1, 2], [3]]}, "global batch", "as the list gives it"),
    ({"batch_sampler": [[1, 2], [3]]}, "steps per epoch", "2"),
    ({"normalize": "fit"}, "inputs", "normalized by the mean and deviation of the training data"),
    ({"max_steps": 7}, "ends after", "10 epochs or 7 steps or a loss that is not finite"),
    ({"validate_every": 2}, "validation", "10 samples, every 2 steps"),
    ({"keep": "last"}, "keeps", "the last weights"),
    ({"compile": True}, "made faster by", "compile"),
    ({"checkpoint": "c", "checkpoint_every": "5m"}, "every", "5m, the last 2 kept"),
    ({"checkpoint": "c", "checkpoint_every": 5}, "every", "5 steps, the last 2 kept"),
    ({"resume": "s3://b/x.pt", "checkpoint": "c"}, "resumes from", "s3://b/x.pt"),
]


@pytest.mark.parametrize(("values", "what", "value"), CHANGES)
def test_an_option_shows_in_the_plan(values: dict[str, Any], what: str, value: str) -> None:
    arguments = (MODEL, data(1000), data(10))
    assert said(TrainingOptions(**values).explain(*arguments, pool=2))[what] == value
    assert said(TrainingOptions().explain(*arguments, pool=2)).get(what) != value
