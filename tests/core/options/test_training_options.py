"""Options of training: defaults, the sentence for every wrong or idle one, JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.core.options import matlab_names
from gpupool.core.options.checks import WORDS
from gpupool.core.options.fields import Profile
from gpupool.core.options.model_facts import ModelFacts
from gpupool.core.options.serialise import describe
from gpupool.core.options.training_options import TrainingOptions

FIELDS = [field.name for field in dataclasses.fields(TrainingOptions)]


def refusal(**values: Any) -> str:
    with pytest.raises(OptionsError) as caught:
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


OPTIMIZERS = "sgdm, adam, adamw, rmsprop, lbfgs, lars, muon"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer": "sgd"}, "optimizer='sgd' is unknown. Did you mean optimizer='sgdm'?"),
        ({"optimizer": "lion"}, f"optimizer='lion' is unknown: choose one of {OPTIMIZERS}."),
        (
            {"optimizer": "lm"},
            "optimizer='lm' is not here: choose 'lbfgs', or one of the others.",
        ),
        ({"shuffle": "yes"}, "shuffle='yes' is unknown: choose one of every-epoch, once, never."),
        (
            {"keep": "best-validation"},
            "keep='best-validation' is unknown. Did you mean keep='best'?",
        ),
        (
            {"execution": "parallel"},
            "execution='parallel' is unknown. Did you mean execution='parallel-auto'?",
        ),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown: choose one of raise, skip."),
        ({"lr": 0}, "lr=0: must be above 0."),
        ({"lr": float("nan")}, "lr=nan: must be above 0."),
        ({"lr": float("inf")}, "lr=inf: must be finite."),
        ({"lr": "0.1"}, "lr='0.1': must be a number."),
        ({"lr": None}, "lr=None: must be a number."),
        ({"epochs": -1}, "epochs=-1: must be above 0."),
        ({"epochs": 1.5}, "epochs=1.5: must be a whole number."),
        ({"epochs": float("inf")}, "epochs=inf: must be a whole number."),
        ({"batch_size": 8.0}, "batch_size=8.0: must be a whole number."),
        ({"batch_size": 0}, "batch_size=0: must be above 0."),
        ({"log_every": 0}, "log_every=0: must be above 0."),
        ({"max_steps": 0}, "max_steps=0: must be above 0."),
        ({"patience": 0}, "patience=0: must be above 0."),
        ({"accumulate": 0}, "accumulate=0: must be above 0."),
        (
            {"accumulate": 9, "batch_size": 8},
            "accumulate=9: a batch of 8 cannot be computed in more parts than it has samples.",
        ),
        ({"seed": -1}, "seed=-1: must be in 0..2**64-1."),
        ({"seed": None}, "seed=None: must be a number."),
        ({"seed": True}, "seed=True: must be a number."),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must not be negative."),
        ({"momentum": 1.0}, "momentum=1: must be at least 0 and below 1."),
        ({"ema": 1}, "ema=1: must be above 0 and below 1."),
        ({"ema": 0}, "ema=0: must be above 0 and below 1."),
        ({"clip": 0}, "clip=0: must be above 0."),
        (
            {"optimizer": "adam", "betas": (0.9, 1.0)},
            "betas=(0.9, 1.0): must be at least 0 and below 1.",
        ),
        ({"optimizer": "adam", "betas": 0.9}, "betas=0.9: must be 2 numbers."),
        ({"optimizer": "adam", "betas": (1, 2, 3)}, "betas=(1, 2, 3): must be 2 numbers."),
        (
            {"rank_load": (0, 0)},
            "rank_load=(0.0, 0.0): must not be negative, and one must be above 0.",
        ),
        ({"rank_load": 2}, "rank_load=2: must be some numbers."),
        (
            {"on_error": "skip", "max_skipped": 0},
            "max_skipped=0: must be a share of the samples, above 0 and at most 1.",
        ),
        (
            {"learn_rate_factors": {"fc.*": 1.0, "conv*": -1}},
            "learn_rate_factors={'conv*': -1}: a factor must be finite and not negative.",
        ),
        (
            {"learn_rate_factors": [("fc", 1)]},
            "learn_rate_factors=[('fc', 1)]: give a dict, as {'head.*': 10}.",
        ),
        (
            {"warmup": "soon"},
            "warmup='soon': write '1 epoch', '500 steps' or a number of steps.",
        ),
        ({"warmup": 0}, "warmup=0: write '1 epoch', '500 steps' or a number of steps."),
        ({"validate_every": "10m"}, "validate_every='10m': write 'epoch' or a number of steps."),
        (
            {"checkpoint": "c", "checkpoint_every": "often"},
            "checkpoint_every='often': write 'epoch' or a number of steps, or a time such as "
            "'10m'.",
        ),
        ({"checkpoint": ""}, "checkpoint='': must be a folder, as 's3://bucket/run1'."),
        ({"callbacks": 3}, "callbacks: 3 cannot be called; give functions of info."),
        (
            {"compile": "fast"},
            "compile='fast' is unknown: choose one of default, reduce-overhead, "
            "max-autotune, max-autotune-no-cudagraphs.",
        ),
        ({"channels_last": "yes"}, "channels_last='yes': must be True or False."),
        (
            {"profile": "s3://b"},
            "profile='s3://b': give gpupool.Profile(url='s3://bucket/traces').",
        ),
        (
            {"schedule": [("cosine", 3)]},
            "schedule=[('cosine', 3)]: has 3 epochs, the training 10; each piece needs at least "
            "one, and all together as many as the training.",
        ),
        (
            {"schedule": ["cosine"]},
            "schedule=['cosine']: give a name, a callable (step, epoch) -> factor, or pairs, as "
            "[('cosine', 20), ('none', 10)].",
        ),
        (
            {"objective": "f1"},
            "objective='f1' is not measured: choose one of loss, accuracy, or add it: "
            "metrics=['f1'].",
        ),
    ],
)
def test_a_wrong_training_option_is_answered_with(values: dict[str, Any], sentence: str) -> None:
    assert refusal(**values) == sentence


WITHOUT_EFFECT = [
    ({"drop_factor": 0.1}, "schedule is 'none': did you mean schedule='piecewise'?"),
    ({"drop_period": 20}, "schedule is 'none': did you mean schedule='piecewise'?"),
    ({"drop_period": 2, "schedule": "cosine"}, "schedule is 'cosine': did you mean"),
    ({"power": 2.0}, "schedule is 'none': did you mean schedule='polynomial'?"),
    ({"min_factor": 0.1}, "schedule is 'none': did you mean schedule='cosine'?"),
    ({"cycle_period": 3}, "schedule is 'none': did you mean schedule='cyclical'?"),
    ({"warmup_factor": 0.1}, "warmup is None: did you mean warmup='1 epoch'?"),
    ({"momentum": 0.9, "optimizer": "adam"}, "optimizer is 'adam': did you mean optimizer='sgdm'?"),
    ({"betas": (0.8, 0.9)}, "optimizer is 'sgdm': did you mean optimizer='adam'?"),
    ({"alpha": 0.9}, "optimizer is 'sgdm': did you mean optimizer='rmsprop'?"),
    ({"eps": 1e-6}, "optimizer is 'sgdm': did you mean optimizer='adam'?"),
    ({"eps": 1e-6, "optimizer": dict}, "optimizer is dict: did you mean optimizer='adam'?"),
    ({"trust_coefficient": 0.01}, "optimizer is 'sgdm': did you mean optimizer='lars'?"),
    ({"weight_decay": 0.1, "optimizer": "lbfgs"}, "optimizer is 'lbfgs': did you mean"),
    ({"weight_decay_factors": {"*": 0.0}}, "weight_decay is 0.0: did you mean weight_decay=1e-4?"),
    ({"max_skipped": 0.1}, "on_error is 'raise': did you mean on_error='skip'?"),
    ({"clip_method": "l2norm"}, "clip is None: did you mean clip=1.0?"),
    ({"checkpoint_every": 10}, "checkpoint is None: did you mean checkpoint='s3://bucket/run1'?"),
    ({"num_checkpoints": 5}, "checkpoint is None: did you mean checkpoint='s3://bucket/run1'?"),
    ({"on_failure": "resume"}, "checkpoint is None: did you mean checkpoint='s3://bucket/run1'?"),
    ({"resume": "auto"}, "checkpoint is None: did you mean checkpoint='s3://bucket/run1', the"),
    ({"resume": True}, "checkpoint is None: did you mean checkpoint='s3://bucket/run1', the"),
    ({"schedule": "piecewise", "drop_period": 10}, "drop_period is 10 and it lasts 10 epochs"),
    ({"schedule": "piecewise", "epochs": 1}, "drop_period is 1 and it lasts 1 epoch:"),
    ({"bn_statistics": "population", "batch_norm": "frozen"}, "batch_norm is 'frozen'"),
]


@pytest.mark.parametrize(("values", "reason"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_answered_with_what_was_meant(
    values: dict[str, Any], reason: str
) -> None:
    name = next(iter(values))
    sentence = refusal(**values)
    assert sentence.startswith(f"{name}={values[name]!r} does nothing while {reason}")


def test_a_warm_up_that_never_ends_is_refused() -> None:
    never = "so the learning rate would never be reached; make it shorter."
    assert refusal(warmup="10 epochs") == (
        f"warmup='10 epochs': the whole training has 10 epochs, {never}"
    )
    assert refusal(warmup=7, max_steps=7) == f"warmup=7: the whole training has 7 steps, {never}"


def test_what_lbfgs_cannot_do_is_refused() -> None:
    assert TrainingOptions(optimizer="lbfgs", learn_rate_factors={"a": 0}).lr == 0.01
    factors = refusal(optimizer="lbfgs", learn_rate_factors={"a": 10})
    assert factors.startswith(
        "learn_rate_factors={'a': 10.0} do nothing while optimizer is 'lbfgs'"
    )
    assert "choose 'bf16'" in refusal(optimizer="lbfgs", precision="fp16")


PLAIN = ModelFacts(100, 0, 400, has_batch_norm=False, has_convolutions=False)


@pytest.mark.parametrize(
    ("values", "facts", "sentence"),
    [
        ({"patience": 4}, {}, "patience=4 does nothing without validation: did you mean"),
        ({"keep": "best"}, {}, "keep='best' does nothing without validation: did you mean"),
        ({"objective": "accuracy"}, {}, "objective='accuracy' does nothing without validation"),
        ({"validate_every": 5}, {}, "validate_every=5 does nothing without validation"),
        ({"metrics": ["f1"]}, {}, "metrics=('f1',) does nothing without validation"),
        (
            {"rank_load": (1, 2, 3)},
            {"num_ranks": 2},
            "rank_load=(1.0, 2.0, 3.0): has 3 shares, and 2 ranks train: give one share for each.",
        ),
        (
            {"max_steps": 101, "batch_size": 10},
            {"num_samples": 100},
            "max_steps=101 does nothing while epochs is 10, which are 100 steps: did you mean "
            "epochs=11?",
        ),
        (
            {"warmup": 30, "batch_size": 40},
            {"num_samples": 100},
            "warmup=30: the whole training has 30 steps, so the learning rate would never be "
            "reached; make it shorter.",
        ),
        (
            {"schedule": "cosine"},
            {"is_stream": True},
            "schedule='cosine' needs the number of steps in an epoch, which a stream of samples",
        ),
        (
            {"schedule": [("none", 5), ("exponential", 5)]},
            {"is_stream": True},
            "schedule=(('none', 5), ('exponential', 5)) needs the number of steps in an epoch",
        ),
        (
            {"profile": Profile(url="traces", skip=10), "batch_size": 100},
            {"num_samples": 100},
            "profile.skip=10: the whole training has 10 steps, so nothing would be traced; make it "
            "smaller.",
        ),
        (
            {"batch_norm": "sync"},
            {"model": PLAIN},
            "batch_norm='sync' does nothing: the model has no batch norm. Leave it out.",
        ),
        (
            {"bn_statistics": "population"},
            {"model": PLAIN},
            "bn_statistics='population' does nothing: the model has no batch norm. Leave it out.",
        ),
        (
            {"precision": "bf16"},
            {"model": dataclasses.replace(PLAIN, has_float32=False)},
            "precision='bf16' does nothing: the model has no float32 parameters. Give",
        ),
        (
            {"channels_last": True},
            {"model": PLAIN},
            "channels_last=True does nothing: the model has no convolutions. Leave it out.",
        ),
    ],
)
def test_what_does_nothing_with_this_data_model_and_ranks_is_refused(
    values: dict[str, Any], facts: dict[str, Any], sentence: str
) -> None:
    options = TrainingOptions(**values)
    with pytest.raises(OptionsError) as caught:
        options.check_for(**{"has_validation": False, **facts})
    assert str(caught.value).startswith(sentence)


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
    assert TrainingOptions(on_error="skip", max_skipped=0.29).most_skipped(100) == 29


# ---- names -----------------------------------------------------------------------------------


def test_every_name_of_matlab_is_answered_with_ours_or_with_what_to_do() -> None:
    for name, ours in matlab_names.NAMES.items():
        assert ours in FIELDS
        assert refusal(**{name: 1}) == f"{name!r} is not an option. Did you mean {ours!r}?"
    for name, advice in matlab_names.ELSEWHERE.items():
        assert refusal(**{name: 1}) == f"{name!r} is not an option. It is not needed: {advice}"


def test_the_words_that_are_meant_are_words_of_ours() -> None:
    for name, meant in matlab_names.WORDS.items():
        for word, ours in meant.items():
            assert refusal(**{name: word}) == (
                f"{name}={word!r} is unknown. Did you mean {name}={ours!r}?"
            )
            TrainingOptions(**{name: ours})


def test_other_names_are_answered_too_and_a_value_needs_one() -> None:
    assert refusal(learning_rate=1) == "'learning_rate' is not an option. Did you mean 'lr'?"
    assert "Did you mean 'batch_size'?" in refusal(batchsize=1)
    assert refusal(xyzzy=1).startswith("'xyzzy' is not an option. There are: optimizer, lr, ")
    assert set(matlab_names.OTHERS.values()) <= {*FIELDS}
    with pytest.raises(OptionsError, match=r"options are given by name, as TrainingOptions\(opt"):
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
        for name in ("shuffle", "scale", "precision", "compress", "batch_norm", "keep", "execution")
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


@given(words, numbers)
def test_json_gives_the_same_options_back(chosen: dict[str, Any], counted: dict[str, Any]) -> None:
    options = TrainingOptions(**chosen, **counted)
    assert TrainingOptions.from_json(options.to_json()) == options
    assert json.loads(json.dumps(describe(options))) == json.loads(options.to_json())


def test_code_is_refused_by_json_and_described_by_its_name() -> None:
    code = {"optimizer": dict, "schedule": max, "callbacks": [print], "metrics": ["f1", min]}
    for name, value in code.items():
        options = TrainingOptions(**{name: value})
        with pytest.raises(OptionsError, match=rf"^{name}: \w+ is code, which JSON cannot hold"):
            options.to_json()
    named = describe(TrainingOptions(**code))
    assert {name: named[name] for name in code} == {
        "optimizer": "dict",
        "schedule": "max",
        "callbacks": ["print"],
        "metrics": ["f1", "min"],
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "these are no options: not JSON"),
        ("[1]", "these are no options: the JSON is no object"),
        ('{"profile": {"url": "x", "stepz": 3}}', "these are no options: profile:"),
        ('{"MaxEpochs": 3}', "'MaxEpochs' is not an option. Did you mean 'epochs'?"),
        ('{"lr": -1}', "lr=-1: must be above 0."),
    ],
)
def test_text_that_is_no_options_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(OptionsError) as caught:
        TrainingOptions.from_json(text)
    assert str(caught.value).startswith(sentence)
