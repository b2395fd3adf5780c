"""Options as keywords of `train`, and options in a wrong place of its arguments."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import gpupool
from gpupool.core.errors import OptionsError
from gpupool.core.options.keywords import merged
from gpupool.core.options.training_options import TrainingOptions
from tests.support.raising import raises

FIELDS = [field.name for field in dataclasses.fields(TrainingOptions)]


def test_completion_in_a_notebook_knows_every_option() -> None:
    parameters = inspect.signature(gpupool.train).parameters
    own = ("model", "dataset", "loss", "options", "validation", "wait")
    assert tuple(parameters) == (*own, *FIELDS)
    assert parameters["epochs"].default == 10


def test_tab_offers_options_by_name() -> None:
    shell = InteractiveShell()
    shell.user_ns["gpupool"] = gpupool
    with provisionalcompleter():
        found = [c.text for c in shell.Completer.completions("gpupool.train(net, ep", 21)]
    assert set(found) >= {"epochs="}


def test_keywords_are_options_and_replace_those_that_are_given() -> None:
    options = TrainingOptions(epochs=3, lr=0.5)
    assert merged("mse", None, {"epochs": 1}) == ("mse", TrainingOptions(epochs=1))
    assert merged("mse", options, {"epochs": 1}) == ("mse", TrainingOptions(epochs=1, lr=0.5))
    assert merged("mse", options, {}) == ("mse", options)
    assert options.epochs == 3


def test_options_in_the_place_of_the_loss_are_options() -> None:
    options = TrainingOptions(epochs=3)
    assert merged(options, None, {"lr": 0.5}) == (
        "auto",
        TrainingOptions(epochs=3, lr=0.5),
    )
    with raises(OptionsError, "loss"):
        merged(options, options, {})


@pytest.mark.parametrize(
    ("loss", "options", "keywords", "name", "shown"),
    [
        ("mse", None, {"epoch": 1}, "epoch", "'epochs'"),
        ("mse", TrainingOptions(), {"epoch": 1}, "epoch", "'epochs'"),
        ("mse", TrainingOptions(), {"epochs": "1"}, "epochs", "number"),
        ("mse", {"epochs": 1}, {}, "options", "train(model, dataset, epochs=1)"),
        ("mse", nn.Sequential(*[nn.Linear(1, 1)] * 99), {}, "options", "..."),
        ("mse", "s3://user:secret@host/x", {}, "options", "TrainingOptions"),
    ],
)
def test_what_is_no_option_is_answered_in_a_short_sentence(
    loss: Any, options: Any, keywords: dict[str, Any], name: str, shown: str
) -> None:
    with raises(OptionsError, name, shown) as caught:
        merged(loss, options, keywords)
    assert len(str(caught.value)) < 300
    assert "secret" not in str(caught.value)
