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
from torch import nn

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import OTHER_NAMES
from gpupool.core.options.fields import changed
from gpupool.core.options.training_options import (
    TrainingOptions,
    check_for,
    merged,
)
from tests.support.raising import raises


def refusal(*names: str, **values: Any) -> str:
    with raises(OptionsError, *names) as caught:
        TrainingOptions(**values)
    return str(caught.value)


def test_numbers_become_plain_ones_and_sequences_tuples() -> None:
    factors = {"head.*": 10.0}
    options = TrainingOptions(
        seed=np.int64(3),  # type: ignore[arg-type]
        lr=np.float32(0.5),  # type: ignore[arg-type]
        metrics="f1",
        inputs=["a", 1],
        checkpoint=Path("runs"),  # type: ignore[arg-type]
        learn_rate_factors=factors,
    )
    assert (type(options.seed), type(options.lr)) == (int, float)
    assert (options.metrics, options.inputs) == (("f1",), ("a", 1))
    assert options.checkpoint == "runs"
    factors["head.*"] = 0.0  # what was given can change afterwards, and the options do not
    assert options.learn_rate_factors == {"head.*": 10.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.lr = 1.0  # type: ignore[misc]


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("optimizer", ["SGD", "lion", SGD, functools.partial(dict, lr=0.2)]),
        ("schedule", [torch.optim.lr_scheduler.StepLR(SGD, 3), [("none", 5)]]),
        ("checkpoint", ["s3:/bucket/run", ""]),
        ("resume", ["s3:/bucket/run", 3]),
        ("shuffle", ["yes"]),
        ("on_error", ["ignore", None]),
        ("lr", [0, float("nan"), float("inf"), "0.1", None]),
        ("epochs", [-1, 1.5, float("inf")]),
        ("batch_size", [8.0, 0]),
        ("workers", [-1, 5000, "many"]),
        ("accumulate", [0]),
        ("seed", [-1, None, True]),
        ("momentum", [1.0]),
        ("ema", [1, 0]),
        ("learn_rate_factors", [{"fc.*": 1.0, "conv*": -1}, [("fc", 1)]]),
        ("warmup", ["soon", 0, True]),
        ("validate_every", ["10m"]),
        ("checkpoint_every", ["often", "600"]),
        ("callbacks", [3, [print, 3]]),
        ("compile", ["max-autotune", 3]),
        ("profile", [3, ""]),
        ("objective", ["f1", 3]),
        ("weights", ["even", 3, ["a"], [1, -1], [1, float("nan")], [0, 0]]),
        ("inputs", ["x", 3, []]),
        ("targets", [1.5]),
    ],
)
def test_a_wrong_training_option_is_refused(name: str, wrong: list[Any]) -> None:
    for value in wrong:
        assert refusal(name, **{name: value}).startswith(name)


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"drop_factor": 0.1}, "schedule='piecewise'"),
        ({"drop_period": 2, "schedule": "cosine"}, "schedule is 'cosine': did you mean"),
        ({"min_factor": 0.1}, "schedule='cosine'"),
        ({"momentum": 0.9, "optimizer": dict}, " dict: did you mean optimizer='sgdm'"),
        ({"weight_decay_factors": {"*": 0.0}}, "weight_decay=1e-4"),
        ({"overwrite": True}, "checkpoint="),
        ({"checkpoint_every": 10}, "checkpoint='s3://bucket/run1'"),
        ({"num_checkpoints": 5}, "checkpoint='s3://bucket/run1'"),
        ({"on_failure": "resume"}, "checkpoint='s3://bucket/run1'"),
        ({"resume": True}, "checkpoint='s3://bucket/run1'"),
        ({"gather": True, "accumulate": 2}, "accumulate"),  # those that exclude each other
        ({"weights": [1], "shuffle": "never"}, "shuffle='once'"),
        ({"overwrite": True, "resume": True, "checkpoint": "c"}, "resume"),
    ],
)
def test_an_option_without_effect_is_answered_with_what_was_meant(
    values: dict[str, Any], meant: str
) -> None:
    assert meant in refusal(next(iter(values)), **values)


def test_what_does_nothing_with_this_data_is_refused() -> None:
    of_validation = {
        "patience": 4,
        "keep": "best",
        "objective": "accuracy",
        "validate_every": 5,
        "metrics": ["f1"],
    }
    values: dict[str, Any]
    for num_samples, values in (
        *((100, {name: value}) for name, value in of_validation.items()),
        (100, {"max_steps": 101, "batch_size": 10}),
        (None, {"workers": 2}),  # of a stream
        (None, {"schedule": "linear"}),
        (None, {"warmup": "1 epoch"}),
        (None, {"on_error": "skip"}),
    ):
        with raises(OptionsError, name := next(iter(values))) as caught:
            check_for(TrainingOptions(**values), has_validation=False, num_samples=num_samples)
        assert name != "max_steps" or " epochs=11?" in str(caught.value)
    options = TrainingOptions(**of_validation, max_steps=29, batch_size=40)  # type: ignore[arg-type]
    check_for(options, has_validation=True, num_samples=100)


# ---- names, and keywords of train ------------------------------------------------------------


def test_every_name_of_others_is_answered_with_ours() -> None:
    others = {name: ours for ours, names in OTHER_NAMES.items() for name in names.split()}
    spellings = {"NumEpochs": "epochs", "MaxEpochs": "epochs", "batchsize": "batch_size"}
    for name, ours in {**others, **spellings, "epocs": "epochs"}.items():
        assert refusal(name, **{name: 1}).endswith(f" {ours!r}?")
    assert refusal("optimizer", optimizer="AdamW").endswith(" 'adamw'?")
    assert len(refusal("xyzzy", xyzzy=1)) < 150
    with raises(OptionsError, "TrainingOptions(optimizer="):
        TrainingOptions("sgdm")  # type: ignore[misc]


def test_keywords_are_options_and_replace_those_that_are_given() -> None:
    options = TrainingOptions(epochs=3, lr=0.5)
    assert merged("mse", None, {"epochs": 1}) == ("mse", TrainingOptions(epochs=1))
    assert merged("mse", options, {"epochs": 1}) == ("mse", TrainingOptions(epochs=1, lr=0.5))
    assert merged(options, None, {"lr": 0.1}) == ("auto", TrainingOptions(epochs=3, lr=0.1))
    assert options.epochs == 3


@pytest.mark.parametrize(
    ("options", "keywords", "shown"),
    [
        (None, {"epoch": 1}, "'epochs'"),
        (TrainingOptions(), {"epochs": "1"}, "number"),
        ({"epochs": 1}, {}, "train(model, dataset, epochs=1)"),
        (nn.Sequential(*[nn.Linear(1, 1)] * 99), {}, "..."),
        ("s3://user:secret@host/x", {}, "TrainingOptions"),
    ],
)
def test_what_is_no_option_is_answered_in_a_short_sentence(
    options: Any, keywords: dict[str, Any], shown: str
) -> None:
    with raises(OptionsError, shown) as caught:
        merged("mse", options, keywords)
    assert len(str(caught.value)) < 300
    assert "secret" not in str(caught.value)


# ---- copies and what is shown -------------------------------------------------------


def test_options_are_copied_pickled_and_replaced() -> None:
    options = TrainingOptions(schedule="cosine", learn_rate_factors={"a": 0}, weights=[1, 2])
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
    assert "weights=<4 numbers>" in repr(options)
    assert {**shown, "checkpoint": ""} == {
        "optimizer": "dict",
        "schedule": "max",
        "weights": "<4 numbers>",
        "callbacks": "(print,)",
        "metrics": "('f1', min)",
        "checkpoint": "",
    }
