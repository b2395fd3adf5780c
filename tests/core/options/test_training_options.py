"""Options of training: defaults, the sentence for every wrong or idle one, JSON."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.core.options import other_names
from gpupool.core.options.checks import WORDS
from gpupool.core.options.fields import Profile
from gpupool.core.options.model_facts import ModelFacts
from gpupool.core.options.serialise import describe
from gpupool.core.options.training_options import TrainingOptions
from tests.support.raising import raises

FIELDS = [field.name for field in dataclasses.fields(TrainingOptions)]


def refusal(kind: str, *names: str, **values: Any) -> str:
    with raises(OptionsError, kind, *names) as caught:
        TrainingOptions(**values)
    return str(caught.value)


def test_the_defaults_of_training() -> None:
    options = TrainingOptions()
    assert (options.optimizer, options.lr, options.momentum) == ("sgdm", 0.01, None)
    assert (options.epochs, options.batch_size, options.shuffle) == (10, 128, "every-epoch")
    assert (options.seed, options.weight_decay, options.learn_rate_factors) == (0, 0.0, {})
    assert (options.schedule, options.keep, options.execution) == ("none", "auto", "auto")


def test_numbers_become_plain_ones_and_sequences_tuples() -> None:
    options = TrainingOptions(
        seed=np.int64(3),  # type: ignore[arg-type]
        lr=np.float32(0.5),  # type: ignore[arg-type]
        betas=[0.5, 0.75],  # type: ignore[arg-type]
        optimizer="adam",
        metrics="f1",
        rank_load=[1, np.int32(2)],  # type: ignore[list-item]
        checkpoint=Path("runs"),  # type: ignore[arg-type]
        schedule=[["cosine", 4], ["none", 6]],  # type: ignore[list-item]
    )
    assert (type(options.seed), type(options.lr)) == (int, float)
    assert (options.betas, options.rank_load) == ((0.5, 0.75), (1.0, 2.0))
    assert (options.metrics, options.checkpoint) == (("f1",), "runs")
    assert options.schedule == (("cosine", 4), ("none", 6))


def test_metrics_may_be_of_several_outputs_or_a_collection() -> None:
    by_output = {"mask": ["mean_iou", max]}
    options = TrainingOptions(metrics=by_output, objective="mask/mean_iou")
    assert options.metrics == by_output
    assert describe(options)["metrics"] == {"mask": ["mean_iou", "max"]}
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


OPTIMIZERS = "sgdm, sgd, adam, adamw, rmsprop, lars, lamb"
PARAMETER = torch.nn.Parameter(torch.zeros(1))
SGD = torch.optim.SGD([PARAMETER], lr=0.1)
StepLR = torch.optim.lr_scheduler.StepLR


@pytest.mark.parametrize(
    ("values", "kind", "name"),
    [
        ({"optimizer": "SGD"}, "unknown", "optimizer"),
        ({"optimizer": SGD}, "object", "optimizer"),
        ({"optimizer": StepLR}, "scheduler", "optimizer"),
        ({"optimizer": lambda: SGD}, "form", "optimizer"),
        ({"schedule": StepLR}, "scheduler", "schedule"),
        ({"schedule": StepLR(SGD, 3)}, "scheduler", "schedule"),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)}, "scheduler", "schedule"),
        ({"schedule": functools.partial(StepLR, step_size=3)}, "scheduler", "schedule"),
        ({"schedule": lambda epoch: 0.9**epoch}, "form", "schedule"),
        ({"nesterov": 1}, "type", "nesterov"),
        ({"checkpoint": "s3:/bucket/run"}, "form", "checkpoint"),
        ({"checkpoint": "s4://bucket/run"}, "form", "checkpoint"),
        ({"tensorboard": "gs:bucket"}, "form", "tensorboard"),
        ({"resume": "s3:/bucket/run"}, "form", "resume"),
        ({"resume": "yes"}, "unknown", "resume"),
        ({"checkpoint": "c", "overwrite": 1}, "type", "overwrite"),
        ({"optimizer": "lion"}, "unknown", "optimizer"),
        ({"optimizer": "lm"}, "not here", "optimizer"),
        ({"shuffle": "yes"}, "unknown", "shuffle"),
        ({"keep": "best-validation"}, "unknown", "keep"),
        ({"execution": "parallel"}, "unknown", "execution"),
        ({"on_error": "ignore"}, "unknown", "on_error"),
        ({"on_error": None}, "unknown", "on_error"),
        ({"execution": None}, "unknown", "execution"),
        ({"lr": 0}, "range", "lr"),
        ({"lr": float("nan")}, "range", "lr"),
        ({"lr": float("inf")}, "not finite", "lr"),
        ({"lr": "0.1"}, "type", "lr"),
        ({"lr": None}, "type", "lr"),
        ({"epochs": -1}, "range", "epochs"),
        ({"epochs": 1.5}, "not whole", "epochs"),
        ({"epochs": float("inf")}, "not whole", "epochs"),
        ({"batch_size": 8.0}, "not whole", "batch_size"),
        ({"batch_size": 0}, "range", "batch_size"),
        ({"log_every": 0}, "range", "log_every"),
        ({"max_steps": 0}, "range", "max_steps"),
        ({"patience": 0}, "range", "patience"),
        ({"workers": -1}, "range", "workers"),
        ({"workers": 5000}, "range", "workers"),
        ({"workers": "many"}, "type", "workers"),
        ({"accumulate": 0}, "range", "accumulate"),
        ({"accumulate": 9, "batch_size": 8}, "range", "accumulate"),
        ({"seed": -1}, "range", "seed"),
        ({"seed": None}, "type", "seed"),
        ({"seed": True}, "type", "seed"),
        ({"weight_decay": -0.1}, "range", "weight_decay"),
        ({"momentum": 1.0}, "range", "momentum"),
        ({"ema": 1}, "range", "ema"),
        ({"ema": 0}, "range", "ema"),
        ({"clip": 0}, "range", "clip"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "range", "betas"),
        ({"optimizer": "adam", "betas": 0.9}, "type", "betas"),
        ({"optimizer": "adam", "betas": (1, 2, 3)}, "length", "betas"),
        ({"rank_load": (0, 0)}, "range", "rank_load"),
        ({"rank_load": 2}, "type", "rank_load"),
        ({"learn_rate_factors": {"fc.*": 1.0, "conv*": -1}}, "range", "learn_rate_factors"),
        ({"learn_rate_factors": [("fc", 1)]}, "type", "learn_rate_factors"),
        ({"warmup": "soon"}, "form", "warmup"),
        ({"warmup": 0}, "form", "warmup"),
        ({"validate_every": "10m"}, "form", "validate_every"),
        ({"checkpoint": "c", "checkpoint_every": "often"}, "form", "checkpoint_every"),
        ({"checkpoint": ""}, "form", "checkpoint"),
        ({"callbacks": 3}, "type", "callbacks"),
        ({"compile": "fast"}, "unknown", "compile"),
        ({"channels_last": "yes"}, "type", "channels_last"),
        ({"profile": "s3://b"}, "type", "profile"),
        ({"schedule": [("cosine", 3)]}, "length", "schedule"),
        ({"schedule": ["cosine"]}, "form", "schedule"),
        ({"objective": "f1"}, "not measured", "objective"),
        ({"weights": "even"}, "unknown", "weights"),
        ({"weights": 3}, "type", "weights"),
        ({"weights": ["a"]}, "type", "weights"),
        ({"weights": [1, -1]}, "range", "weights"),
        ({"weights": [1, float("nan")]}, "range", "weights"),
        ({"weights": [0, 0]}, "range", "weights"),
        ({"weights": [1], "shuffle": "never"}, "conflict", "weights"),
        ({"bucket_by": 3}, "type", "bucket_by"),
        ({"bucket_by": [1, float("inf")]}, "range", "bucket_by"),
        ({"bucket_by": [1], "shuffle": "never"}, "conflict", "bucket_by"),
        ({"batch_sampler": 3}, "type", "batch_sampler"),
        ({"batch_sampler": "train"}, "type", "batch_sampler"),
        ({"batch_sampler": iter([[1]])}, "iterator", "batch_sampler"),
    ],
)
def test_a_wrong_training_option_is_refused(values: dict[str, Any], kind: str, name: str) -> None:
    assert refusal(kind, name, **values).startswith(name)


class ByHand:
    """A sampler."""

    def __iter__(self) -> Any:
        return iter([[1]])


WITHOUT_EFFECT = [
    ({"drop_factor": 0.1}, "schedule='piecewise'"),
    ({"drop_period": 20}, "schedule='piecewise'"),
    ({"drop_period": 2, "schedule": "cosine"}, "schedule is 'cosine': did you mean"),
    ({"power": 2.0}, "schedule='polynomial'"),
    ({"min_factor": 0.1}, "schedule='cosine'"),
    ({"cycle_period": 3}, "schedule='cyclical'"),
    ({"warmup_factor": 0.1}, "warmup='1 epoch'"),
    ({"momentum": 0.9, "optimizer": "adam"}, "optimizer='sgdm'"),
    ({"betas": (0.8, 0.9)}, "optimizer='adam'"),
    ({"alpha": 0.9}, "optimizer='rmsprop'"),
    ({"nesterov": True, "optimizer": "adam"}, "optimizer='sgdm'"),
    ({"nesterov": True, "optimizer": "sgd"}, "momentum=0.9"),
    ({"nesterov": True, "momentum": 0}, "momentum=0.9"),
    ({"overwrite": True}, "checkpoint="),
    ({"eps": 1e-6}, "optimizer='adam'"),
    ({"eps": 1e-6, "optimizer": dict}, " dict: "),
    ({"trust_coefficient": 0.01}, "optimizer='lars'"),
    ({"weight_decay_factors": {"*": 0.0}}, "weight_decay=1e-4"),
    ({"batch_size": 64, "batch_sampler": [[1]]}, "batch_sampler is [[1]]"),
    ({"shuffle": "once", "batch_sampler": ByHand()}, "batch_sampler is a ByHand"),
    ({"scale": "linear", "batch_sampler": [[1]]}, "batch_sampler=None"),
    ({"weights": [1], "batch_sampler": [[1]]}, "batch_sampler=None"),
    ({"checkpoint_every": 10}, "checkpoint='s3://bucket/run1'"),
    ({"num_checkpoints": 5}, "checkpoint='s3://bucket/run1'"),
    ({"on_failure": "resume"}, "checkpoint='s3://bucket/run1'"),
    ({"resume": "auto"}, "checkpoint='s3://bucket/run1'"),
    ({"resume": True}, "checkpoint='s3://bucket/run1'"),
    ({"schedule": "piecewise", "drop_period": 10}, "drop_period is 10 and it lasts 10 epochs"),
    ({"schedule": "piecewise", "epochs": 1}, "drop_period is 1 and it lasts 1 epoch:"),
]


@pytest.mark.parametrize(("values", "meant"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_answered_with_what_was_meant(
    values: dict[str, Any], meant: str
) -> None:
    name = next(iter(values))
    assert meant in refusal("no effect", name, **values)


def test_a_warm_up_that_never_ends_is_refused() -> None:
    assert " 10 epochs, " in refusal("too long", "warmup", warmup="10 epochs")
    assert " 7 steps, " in refusal("too long", "warmup", warmup=7, max_steps=7)


PLAIN = ModelFacts(100, 0, 400, has_batch_norm=False, has_convolutions=False)


@pytest.mark.parametrize(
    ("values", "facts", "kind", "name"),
    [
        ({"patience": 4}, {}, "no effect", "patience"),
        ({"keep": "best"}, {}, "no effect", "keep"),
        ({"objective": "accuracy"}, {}, "no effect", "objective"),
        ({"validate_every": 5}, {}, "no effect", "validate_every"),
        ({"metrics": ["f1"]}, {}, "no effect", "metrics"),
        ({"rank_load": (1, 2, 3)}, {"num_ranks": 2}, "length", "rank_load"),
        ({"max_steps": 101, "batch_size": 10}, {"num_samples": 100}, "no effect", "max_steps"),
        ({"warmup": 30, "batch_size": 40}, {"num_samples": 100}, "too long", "warmup"),
        ({"schedule": "cosine"}, {"is_stream": True}, "unknown length", "schedule"),
        ({"workers": 2}, {"is_stream": True}, "no effect", "workers"),
        (
            {"schedule": "cosine", "batch_sampler": ByHand()},
            {"num_samples": 100},
            "unknown length",
            "schedule",
        ),
        (
            {"schedule": [("none", 5), ("exponential", 5)]},
            {"is_stream": True},
            "unknown length",
            "schedule",
        ),
        (
            {"profile": Profile(url="traces", skip=10), "batch_size": 100},
            {"num_samples": 100},
            "too long",
            "profile",
        ),
        ({"batch_norm": "sync"}, {"model": PLAIN}, "no effect", "batch_norm"),
        (
            {"precision": "bf16"},
            {"model": dataclasses.replace(PLAIN, has_float32=False)},
            "no effect",
            "precision",
        ),
        ({"channels_last": True}, {"model": PLAIN}, "no effect", "channels_last"),
    ],
)
def test_what_does_nothing_with_this_data_model_and_ranks_is_refused(
    values: dict[str, Any], facts: dict[str, Any], kind: str, name: str
) -> None:
    options = TrainingOptions(**values)
    with raises(OptionsError, kind, name):
        options.check_for(**{"has_validation": False, **facts})


def test_what_does_nothing_is_answered_with_numbers_of_the_data_and_the_ranks() -> None:
    for values, facts, numbers in (
        ({"rank_load": (1, 2, 3)}, {"num_ranks": 2}, (" 3 shares", " 2 ranks")),
        ({"max_steps": 101, "batch_size": 10}, {"num_samples": 100}, (" 100 steps", " epochs=11?")),
        ({"warmup": 30, "batch_size": 40}, {"num_samples": 100}, (" 30 steps",)),
    ):
        with pytest.raises(OptionsError) as caught:
            TrainingOptions(**values).check_for(**{"has_validation": False, **facts})
        assert all(number in str(caught.value) for number in numbers)


def test_what_works_with_data_model_and_ranks_is_let_through() -> None:
    norms = dataclasses.replace(PLAIN, has_batch_norm=True, has_convolutions=True)
    TrainingOptions(
        patience=4,
        keep="best",
        objective="accuracy",
        validate_every=5,
        metrics=["f1"],
        rank_load=(1, 0),
        max_steps=29,
        warmup=3,
        batch_size=40,
        batch_norm="sync",
        channels_last=True,
    ).check_for(has_validation=True, num_ranks=2, num_samples=100, model=norms)


def test_what_needs_no_length_is_let_through_for_a_stream() -> None:
    for values in (
        {"schedule": "piecewise", "warmup": 100},
        {"schedule": "cosine", "max_steps": 100},
        {"schedule": max},
    ):
        TrainingOptions(**values).check_for(has_validation=False, is_stream=True)


def test_a_share_of_the_samples_may_be_skipped_and_always_one() -> None:
    assert TrainingOptions().most_skipped(10_000) == 0
    skipping = TrainingOptions(on_error="skip")
    assert [skipping.most_skipped(num) for num in (5, 1000, 10_000)] == [1, 1, 10]


# ---- names -----------------------------------------------------------------------------------


def test_every_name_of_others_is_answered_with_ours_or_with_what_to_do() -> None:
    for name, ours in {**other_names.OTHERS, **other_names.NAMES}.items():
        assert ours in FIELDS
        assert refusal("no option", name, **{name: 1}).endswith(f" {ours!r}?")
    for name, advice in other_names.ELSEWHERE.items():
        said = refusal("no option", name, **{name: 1})
        assert said.endswith(f": {advice}")
        assert len(said) < 250


def test_no_name_is_answered_twice() -> None:
    tables = (FIELDS, other_names.NAMES, other_names.OTHERS, other_names.ELSEWHERE)
    plain = [name.replace("_", "").lower() for table in tables for name in table]
    own = {"momentum", "shuffle", "metrics"}  # MATLAB's, which are ours but for the capital letter
    assert {name for name in plain if plain.count(name) > 1} <= own


def test_names_are_found_however_they_are_written() -> None:
    assert refusal("no option", "NumEpochs", NumEpochs=1).endswith(" 'epochs'?")
    assert refusal("no option", "plots", plots=1).endswith(" 'progress'?")
    assert refusal("no option", "batchsize", batchsize=1).endswith(" 'batch_size'?")
    assert other_names.ELSEWHERE["drop_last"] in refusal(
        "no option", "dropLastBatch", dropLastBatch=True
    )


def test_the_words_that_are_meant_are_words_of_ours() -> None:
    for name, meant in other_names.WORDS.items():
        for word, ours in meant.items():
            assert refusal("unknown", name, **{name: word}).endswith(f" {name}={ours!r}?")
            TrainingOptions(**{name: ours})
    assert refusal("unknown", "optimizer", optimizer="AdamW").endswith(" optimizer='adamw'?")


def test_a_name_that_nobody_knows_is_answered_with_where_all_are() -> None:
    assert len(refusal("no option", "xyzzy", xyzzy=1)) < 150
    with raises(OptionsError, "by position"):
        TrainingOptions("sgdm")  # type: ignore[misc]


# ---- scaling, copies and JSON ----------------------------------------------------------------


def test_linear_scaling_takes_batch_and_rate_times_the_ranks() -> None:
    """The batches and rates of the paper: 250 and 0.00125 on one GPU, 2000 and 0.01 on eight."""
    given = TrainingOptions(batch_size=250, lr=0.00125, scale="linear", warmup="1 epoch")
    resolved = given.resolve(8)
    assert (resolved.batch_size, resolved.lr) == (2000, pytest.approx(0.01))
    assert resolved.warmup_factor == 1 / 8
    assert resolved.resolve(8) == resolved
    assert (given.resolve(1).batch_size, given.resolve(1).lr) == (250, 0.00125)
    assert TrainingOptions().resolve(8) == TrainingOptions()


def test_options_are_copied_pickled_and_replaced() -> None:
    options = TrainingOptions(schedule="cosine", learn_rate_factors={"a": 0})
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, lr=1.0).lr == 1.0


words = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from(WORDS[name])
        for name in ("shuffle", "scale", "precision", "batch_norm", "keep", "execution")
    },
)
numbers = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(1e-9, 1e9),
        "seed": st.integers(0, 2**64 - 1),
        "clip": st.floats(1e-9, 1e9),
        "ema": st.floats(1e-9, 1 - 1e-9),
        "rank_load": st.lists(st.floats(1e-9, 1e9), min_size=1),
        "learn_rate_factors": st.dictionaries(st.text(), st.floats(0, 1e9)),
        "metrics": st.lists(st.text()),
        "schedule": st.sampled_from(["cosine", [("none", 4), ("piecewise", 6)]]),
        "warmup": st.sampled_from(["1 epoch", "3 steps", 7]),
        "profile": st.builds(Profile, url=st.just("s3://b/t"), skip=st.integers(0, 99)),
        "tensorboard": st.text(min_size=1).filter(str.strip),
        "max_steps": st.integers(100, 10**9),
    },
)
orders = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"weights": st.lists(st.floats(1e-9, 1e9), min_size=1)}),
    st.fixed_dictionaries({"bucket_by": st.lists(st.integers(0, 10**9))}),
)


@given(words, numbers)
def test_json_gives_the_same_options_back(chosen: dict[str, Any], counted: dict[str, Any]) -> None:
    options = TrainingOptions(**chosen, **counted)
    assert TrainingOptions.from_json(options.to_json()) == options
    assert json.loads(json.dumps(describe(options))) == json.loads(options.to_json())


@given(orders, st.sampled_from(["once", "every-epoch"]))
def test_numbers_for_each_sample_are_kept_by_json_and_not_shown(
    numbers: dict[str, Any], shuffle: str
) -> None:
    options = TrainingOptions(**numbers, shuffle=shuffle)
    again = TrainingOptions.from_json(options.to_json())
    assert again == options == copy.deepcopy(options)
    for name, values in numbers.items():
        assert list(getattr(again, name)) == values
        assert describe(options)[name] == f"<{len(values):,} numbers>"
        assert f"{name}=<{len(values):,} numbers>" in repr(options)


def test_code_is_refused_by_json_and_described_by_its_name() -> None:
    code = {"optimizer": dict, "schedule": max, "callbacks": [print], "metrics": ["f1", min]}
    for name, value in code.items():
        options = TrainingOptions(**{name: value})
        with raises(OptionsError, "code", name):
            options.to_json()
    named = describe(TrainingOptions(**code))
    assert {name: named[name] for name in code} == {
        "optimizer": "dict",
        "schedule": "max",
        "callbacks": ["print"],
        "metrics": ["f1", "min"],
    }


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("{", "not JSON", []),
        ("[1]", "no object", []),
        ('{"profile": {"url": "x", "stepz": 3}}', "form", ["profile"]),
        ('{"MaxEpochs": 3}', "no option", ["MaxEpochs"]),
        ('{"lr": -1}', "range", ["lr"]),
    ],
)
def test_text_that_is_no_options_is_refused(text: str, kind: str, names: list[str]) -> None:
    with raises(OptionsError, kind, *names):
        TrainingOptions.from_json(text)
