"""Options of training: defaults, the error for every wrong or idle one, names, copies."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupool.core.errors import OptionsError
from gpupool.core.options import other_names
from gpupool.core.options.effects import check_for
from gpupool.core.options.schedule import check_for_stream
from gpupool.core.options.training_options import Profile, TrainingOptions, changed
from tests.support.raising import raises

FIELDS = [field.name for field in dataclasses.fields(TrainingOptions)]


def refusal(*names: str, **values: Any) -> str:
    with raises(OptionsError, *names) as caught:
        TrainingOptions(**values)
    return str(caught.value)


def test_the_defaults_of_training() -> None:
    options = TrainingOptions()
    assert (options.optimizer, options.lr, options.momentum) == ("sgdm", 0.01, None)
    assert (options.epochs, options.batch_size, options.shuffle) == (10, 128, "every-epoch")
    assert (options.seed, options.weight_decay, options.learn_rate_factors) == (0, 0.0, {})
    assert (options.schedule, options.keep) == ("none", "auto")


def test_numbers_become_plain_ones_and_sequences_tuples() -> None:
    options = TrainingOptions(
        seed=np.int64(3),  # type: ignore[arg-type]
        lr=np.float32(0.5),  # type: ignore[arg-type]
        metrics="f1",
        inputs=["a", 1],
        checkpoint=Path("runs"),  # type: ignore[arg-type]
    )
    assert (type(options.seed), type(options.lr)) == (int, float)
    assert (options.metrics, options.inputs) == (("f1",), ("a", 1))
    assert options.checkpoint == "runs"


def test_metrics_may_be_of_several_outputs_or_a_collection() -> None:
    by_output = {"mask": ["mean_iou", max]}
    options = TrainingOptions(metrics=by_output, objective="mask/mean_iou")
    assert options.metrics == by_output
    assert TrainingOptions(metrics=max, objective="max").metrics == (max,)

    class Collection(dict[str, Any]):
        """Like one of torchmetrics: a dict that is called."""

        def __call__(self) -> None: ...
        def compute(self) -> None: ...

    collection = Collection(a=1)
    assert TrainingOptions(metrics=collection, objective="a").metrics == (collection,)


def test_what_was_given_can_change_afterwards_and_the_options_do_not() -> None:
    factors = {"head.*": 10.0}
    options = TrainingOptions(learn_rate_factors=factors)
    factors["head.*"] = 0.0
    assert options.learn_rate_factors == {"head.*": 10.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.lr = 1.0  # type: ignore[misc]


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
StepLR = torch.optim.lr_scheduler.StepLR


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"optimizer": "SGD"}, "optimizer"),
        ({"optimizer": SGD}, "optimizer"),
        ({"optimizer": StepLR}, "optimizer"),
        ({"optimizer": lambda: SGD}, "optimizer"),
        ({"optimizer": functools.partial(torch.optim.Adam, lr=0.1), "lr": 0.2}, "lr"),
        ({"schedule": StepLR}, "schedule"),
        ({"schedule": StepLR(SGD, 3)}, "schedule"),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)}, "schedule"),
        ({"schedule": lambda step, epoch: 0.9**epoch}, "schedule"),
        ({"schedule": [("none", 5), ("cosine", 5)]}, "schedule"),
        ({"schedule": functools.partial(StepLR, step_size=3)}, "schedule"),
        ({"checkpoint": "s3:/bucket/run"}, "checkpoint"),
        ({"tensorboard": "gs:bucket"}, "tensorboard"),
        ({"resume": "s3:/bucket/run"}, "resume"),
        ({"resume": "yes"}, "resume"),
        ({"checkpoint": "c", "overwrite": 1}, "overwrite"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"shuffle": "yes"}, "shuffle"),
        ({"keep": "Best"}, "keep"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_error": None}, "on_error"),
        ({"lr": 0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"lr": "0.1"}, "lr"),
        ({"lr": None}, "lr"),
        ({"epochs": -1}, "epochs"),
        ({"epochs": 1.5}, "epochs"),
        ({"epochs": float("inf")}, "epochs"),
        ({"batch_size": 8.0}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_steps": 0}, "max_steps"),
        ({"patience": 0}, "patience"),
        ({"workers": -1}, "workers"),
        ({"workers": 5000}, "workers"),
        ({"workers": "many"}, "workers"),
        ({"accumulate": 0}, "accumulate"),
        ({"accumulate": 9, "batch_size": 8}, "accumulate"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"seed": True}, "seed"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"ema": 1}, "ema"),
        ({"ema": 0}, "ema"),
        ({"clip": 0}, "clip"),
        ({"learn_rate_factors": {"fc.*": 1.0, "conv*": -1}}, "learn_rate_factors"),
        ({"learn_rate_factors": [("fc", 1)]}, "learn_rate_factors"),
        ({"warmup": "soon"}, "warmup"),
        ({"warmup": 0}, "warmup"),
        ({"validate_every": "10m"}, "validate_every"),
        ({"checkpoint": "c", "checkpoint_every": "often"}, "checkpoint_every"),
        ({"checkpoint": ""}, "checkpoint"),
        ({"callbacks": 3}, "callbacks"),
        ({"compile": "fast"}, "compile"),
        ({"channels_last": "yes"}, "channels_last"),
        ({"profile": "s3://b"}, "profile"),
        ({"objective": "f1"}, "objective"),
        ({"weights": "even"}, "weights"),
        ({"weights": 3}, "weights"),
        ({"weights": ["a"]}, "weights"),
        ({"weights": [1, -1]}, "weights"),
        ({"weights": [1, float("nan")]}, "weights"),
        ({"weights": [0, 0]}, "weights"),
    ],
)
def test_a_wrong_training_option_is_refused(values: dict[str, Any], name: str) -> None:
    assert refusal(name, **values).startswith(name)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ({"gather", "accumulate"}, {"gather": True, "accumulate": 2}),
        ({"weights"}, {"weights": [1], "shuffle": "never"}),
        ({"compile"}, {"deterministic": True, "compile": "max-autotune"}),
        ({"overwrite", "resume"}, {"checkpoint": "c", "overwrite": True, "resume": True}),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    names: set[str], values: dict[str, Any]
) -> None:
    refusal(*names, **values)


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"drop_factor": 0.1}, "schedule='piecewise'"),
        ({"drop_period": 2, "schedule": "cosine"}, "schedule is 'cosine': did you mean"),
        ({"min_factor": 0.1}, "schedule='cosine'"),
        ({"momentum": 0.9, "optimizer": "adam"}, "optimizer='sgdm'"),
        ({"momentum": 0.9, "optimizer": dict}, " dict: "),
        ({"weight_decay_factors": {"*": 0.0}}, "weight_decay=1e-4"),
        ({"overwrite": True}, "checkpoint="),
        ({"checkpoint_every": 10}, "checkpoint='s3://bucket/run1'"),
        ({"num_checkpoints": 5}, "checkpoint='s3://bucket/run1'"),
        ({"on_failure": "resume"}, "checkpoint='s3://bucket/run1'"),
        ({"resume": "auto"}, "checkpoint='s3://bucket/run1'"),
        ({"resume": True}, "checkpoint='s3://bucket/run1'"),
    ],
)
def test_an_option_without_effect_is_answered_with_what_was_meant(
    values: dict[str, Any], meant: str
) -> None:
    name = next(iter(values))
    assert meant in refusal(name, **values)


@pytest.mark.parametrize(
    ("values", "num_samples", "name"),
    [
        ({"patience": 4}, 100, "patience"),
        ({"keep": "best"}, 100, "keep"),
        ({"objective": "accuracy"}, 100, "objective"),
        ({"validate_every": 5}, 100, "validate_every"),
        ({"metrics": ["f1"]}, 100, "metrics"),
        ({"max_steps": 101, "batch_size": 10}, 100, "max_steps"),
        ({"workers": 2}, None, "workers"),
    ],
)
def test_what_does_nothing_with_this_data_is_refused(
    values: dict[str, Any], num_samples: int | None, name: str
) -> None:
    with raises(OptionsError, name) as caught:
        check_for(TrainingOptions(**values), has_validation=False, num_samples=num_samples)
    assert name != "max_steps" or " epochs=11?" in str(caught.value)


def test_what_works_with_the_data_is_let_through() -> None:
    options = TrainingOptions(
        patience=4,
        keep="best",
        objective="accuracy",
        validate_every=5,
        metrics=["f1"],
        max_steps=29,
        batch_size=40,
    )
    check_for(options, has_validation=True, num_samples=100)


def test_of_a_stream_only_what_needs_no_length_is_let_through() -> None:
    for values in (
        {"schedule": "piecewise", "warmup": 100},
        {"schedule": "cosine", "max_steps": 100},
        {"schedule": max},
    ):
        check_for_stream(TrainingOptions(**values))
    for values in ({"schedule": "cosine"}, {"warmup": "1 epoch"}):
        with raises(OptionsError, next(iter(values))):
            check_for_stream(TrainingOptions(**values))


def test_a_share_of_the_samples_may_be_skipped_and_always_one() -> None:
    assert TrainingOptions().most_skipped(10_000) == 0
    skipping = TrainingOptions(on_error="skip")
    assert [skipping.most_skipped(num) for num in (5, 1000, 10_000)] == [1, 1, 10]


# ---- names -----------------------------------------------------------------------------------


def test_every_name_of_others_is_answered_with_ours() -> None:
    for name, ours in other_names.NAMES.items():
        assert ours in FIELDS
        assert refusal(name, **{name: 1}).endswith(f" {ours!r}?")


def test_names_are_found_however_they_are_written() -> None:
    assert refusal("NumEpochs", NumEpochs=1).endswith(" 'epochs'?")
    assert refusal("MaxEpochs", MaxEpochs=1).endswith(" 'epochs'?")
    assert refusal("batchsize", batchsize=1).endswith(" 'batch_size'?")
    assert refusal("epocs", epocs=1).endswith(" 'epochs'?")
    assert refusal("optimizer", optimizer="AdamW").endswith(" optimizer='adamw'?")


def test_a_name_that_nobody_knows_is_answered_with_where_all_are() -> None:
    assert len(refusal("xyzzy", xyzzy=1)) < 150
    with raises(OptionsError, "optimizer='sgdm', lr=0.01"):
        TrainingOptions("sgdm")  # type: ignore[misc]


# ---- copies and what is shown -------------------------------------------------------


def test_options_are_copied_pickled_and_replaced() -> None:
    options = TrainingOptions(
        schedule="cosine", learn_rate_factors={"a": 0}, weights=[1, 2], profile=Profile(url="x")
    )
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, lr=1.0).lr == 1.0


def test_what_differs_from_the_defaults_is_shown_in_short_and_without_passwords() -> None:
    options = TrainingOptions(
        optimizer=dict,
        schedule=max,
        callbacks=[print],
        metrics=["f1", min],
        weights=range(1, 5),
        checkpoint="s3://me:canary@bucket/run",
    )
    shown = changed(options)
    assert "canary" not in f"{shown} {options}"
    assert "checkpoint" in shown
    del shown["checkpoint"]
    assert shown == {
        "optimizer": "dict",
        "schedule": "max",
        "weights": "<4 numbers>",
        "callbacks": "(print,)",
        "metrics": "('f1', min)",
    }
    assert "weights=<4 numbers>" in repr(options)
    assert "lr=0.01" in repr(options)


def test_the_lr_of_a_partial_is_the_option() -> None:
    options = TrainingOptions(optimizer=functools.partial(torch.optim.Muon, lr=0.02))
    assert options.lr == 0.02
    assert isinstance(options.optimizer, functools.partial)
    assert options.optimizer.keywords == {}
