"""What help and editors know of the options: names, words, meanings."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import subprocess
import sys

import jedi
import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpupool
from gpupool.core.options.option_help import option_help
from gpupool.core.options.training_options import TrainingOptions

OPTIONS = {one.name: one for one in option_help(TrainingOptions)}


def test_every_option_has_a_meaning_and_a_place_in_the_docstring() -> None:
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(TrainingOptions)]
    text = inspect.getdoc(TrainingOptions) or ""
    for name, option in OPTIONS.items():
        assert f"\n    {name} = {option.default}\n" in text
        assert " ".join(option.meaning.split())[:60] in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", ["shuffle", "precision", "optimizer", "schedule", "compile"])
def test_the_words_of_an_option_are_in_its_help_and_are_taken(name: str) -> None:
    lines = (inspect.getdoc(TrainingOptions) or "").split(f"\n    {name} = ")[1]
    shown = lines.split("\n    ")[0] + lines
    for word in OPTIONS[name].words:
        assert f'"{word}"' in shown
    assert len(OPTIONS[name].words) > 1


def test_the_signature_has_every_option_with_its_default_and_words() -> None:
    parameters = inspect.signature(TrainingOptions).parameters
    assert list(parameters) == list(OPTIONS)
    assert parameters["lr"].default == 0.01
    assert "Literal['every-epoch', 'once', 'never']" in str(parameters["shuffle"])
    assert "'" not in str(parameters["lr"])
    assert inspect.signature(gpupool.train).parameters["shuffle"] == parameters["shuffle"]
    assert "'nccl'" in str(inspect.signature(gpupool.start).parameters["backend"])


def test_question_mark_shows_options_and_meanings() -> None:
    shell = InteractiveShell()
    shell.user_ns["TrainingOptions"] = TrainingOptions
    text = re.sub(r"\x1b\[[\d;]*m", "", shell.object_inspect_text("TrainingOptions"))
    assert "drop_factor: float | None = None" in text
    assert "Factor of a drop in" in text


def test_help_costs_nothing_before_it_is_asked_for() -> None:
    code = (
        "import gpupool; T = gpupool.TrainingOptions; T(lr=0.1)\n"
        "lazy = [vars(T)[name] for name in ('__doc__', '__signature__')]\n"
        "print([one._make.cache_info().currsize for one in lazy], "
        "bool(T.__doc__), T().__doc__ == T.__doc__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.stderr) == ("[0, 0] True True", "")


def test_options_are_pickled_as_before() -> None:
    options = TrainingOptions(shuffle="once")
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("call", ["gpupool.TrainingOptions(sch", "TrainingOptions(sch"])
def test_jedi_offers_names_of_options(call: str) -> None:
    names = {"gpupool": gpupool, "TrainingOptions": TrainingOptions}
    found = [one.name for one in jedi.Interpreter(call, [names]).complete(1, len(call))]
    assert "schedule=" in found


def test_jedi_reads_them_from_a_script() -> None:
    code = "import gpupool\ngpupool.TrainingOptions(sch"
    assert "schedule=" in [one.name for one in jedi.Script(code).complete(2, 27)]
