"""What help, completion and editors know of the options: names, defaults, words, meanings."""

from __future__ import annotations

import dataclasses
import inspect
import re

import jedi
import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import gpupool
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.options.training_options import TrainingOptions

FIELDS = [field.name for field in dataclasses.fields(TrainingOptions)]


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    shell = InteractiveShell()
    shell.user_ns |= {"gpupool": gpupool, "TrainingOptions": TrainingOptions}
    return shell


def test_every_option_has_a_meaning_and_a_place_in_the_docstring(shell: InteractiveShell) -> None:
    assert len(FIELDS) <= 50
    for kind in (TrainingOptions, PoolOptions):
        text = inspect.getdoc(kind) or ""
        found = re.findall(r"(?m)^  (\w+) = (.+)\n((?:    .+\n|\n(?=    ))+)", f"{text}\n")
        parameters = inspect.signature(kind).parameters
        assert [name for name, *_ in found] == [one.name for one in dataclasses.fields(kind)]
        for name, default, meaning in found:
            assert default == repr(parameters[name].default)
            for word in re.findall(r"'(\S+?)'", str(parameters[name])):
                assert f'"{word}"' in meaning or f"'{word}'" == default
        assert max(map(len, text.splitlines())) <= 100
    asked = re.sub(r"\x1b\[[\d;]*m", "", shell.object_inspect_text("TrainingOptions"))
    assert "drop_factor: float | None = None" in asked
    assert "Factor of a drop in" in asked


def test_signatures_have_every_option_with_its_default_and_words() -> None:
    parameters = inspect.signature(TrainingOptions).parameters
    assert list(parameters) == FIELDS
    assert (parameters["lr"].default, parameters["epochs"].default) == (0.01, 10)
    assert "Literal['every-epoch', 'once', 'never']" in str(parameters["shuffle"])
    assert "'" not in str(parameters["lr"])
    of_train = inspect.signature(gpupool.train).parameters
    own = ["model", "dataset", "loss", "options", "validation", "wait"]
    assert list(of_train) == [*own, *FIELDS]
    assert of_train["shuffle"] == parameters["shuffle"]
    assert "'nccl'" in str(inspect.signature(gpupool.start).parameters["backend"])


def test_tab_and_editors_offer_options_by_name(shell: InteractiveShell) -> None:
    with provisionalcompleter():
        found = [c.text for c in shell.Completer.completions("gpupool.train(net, ep", 21)]
    assert "epochs=" in found
    names = {"gpupool": gpupool, "TrainingOptions": TrainingOptions}
    for call in ("gpupool.TrainingOptions(sch", "TrainingOptions(sch"):
        offered = jedi.Interpreter(call, [names]).complete(1, len(call))
        assert "schedule=" in [one.name for one in offered]
    script = jedi.Script("import gpupool\ngpupool.TrainingOptions(sch")
    assert "schedule=" in [one.name for one in script.complete(2, 27)]
