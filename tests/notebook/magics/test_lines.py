"""What may stand on a magic's line: understood, explained, or refused in a sentence."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics import arguments
from gpupool.notebook.magics.arguments import COMMANDS, SPMD
from tests.support.raising import raises

PARSERS = {**COMMANDS, "%%spmd": SPMD}
OPTIONS = sorted({name for parser in PARSERS.values() for name in parser.option_names()})
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def parsed(line: str) -> dict[str, object]:
    magic, _, rest = line.partition(" ")
    return vars(SPMD.parse_line(rest) if magic == "%%spmd" else arguments.parse(line))


def refusal(command: str, line: str) -> str:
    """What is wrong with a line; "" if nothing is."""
    try:
        PARSERS[command].parse_line(line)
    except OptionsError as error:
        return str(error)
    return ""


# ---- understood, or refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "start slurm -n 16 -- -p gpu -h",  # of the scheduler
            {"command": "start", "profile": "slurm", "n": 16, "words": ["-p", "gpu", "-h"]},
        ),
        ("restart -1,0", {"command": "restart", "ranks": "-1,0"}),
        ("log 1 -n 20", {"command": "log", "rank": "1", "n": 20}),
        ("", {"command": "status"}),
        *((line, {"command": "help", "topic": "debug"}) for line in ("debug -h", "debug 1 --help")),
        *((line, {"command": "help", "topic": None}) for line in ("-h", "help", "help -h")),
    ],
)
def test_what_a_line_means(line: str, found: dict[str, object]) -> None:
    assert parsed(line) == found


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("strat", "%gpupool has no command 'strat'. Did you mean 'start'?"),
        ("start --tiemout 3", "%gpupool start has no option --tiemout. Did you mean '--timeout'?"),
        ("start --backend ncl", "argument --backend: there is no such word. Did you mean 'nccl'?"),
        ("start --timeout nan", "--timeout: give a number of seconds above 0. Usage: %gpupool sta"),
        ("start --cpu=x", "argument --cpu: it takes no value."),
        ("start local remote", "'remote' is too much. Usage: %gpupool start [PROFILE] [options"),
        ("sync 0", "arguments are required: NAME. Usage: %gpupool sync [-t RANKS] RANK NAME [NAM"),
        ("env 'AWS_*", "%gpupool: No closing quotation."),
        ("%%spmd --local", "%%spmd has no option --local. There are: -t, --targets, -o,"),
        ("%%spmd -o a.b", "argument -o/--out: give a name that a variable can have."),
        ("%%spmd rank", "%%spmd: 'rank' is too much. Usage: %%spmd [-t RANKS] [-o NAME]"),
    ],
)
def test_a_bad_line_is_answered_with_what_is_allowed(line: str, sentence: str) -> None:
    with raises(OptionsError, sentence):
        parsed(line)


@given(st.sampled_from(sorted(PARSERS)), st.text())
def test_any_text_is_parsed_or_refused_in_one_line(command: str, text: str) -> None:
    said = refusal(command, text)
    assert said.startswith(PARSERS[command].prog) or not said
    assert len(said.splitlines()) <= 1


SECRET = "hunter2 '\"hunter2"


@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(st.sampled_from([*OPTIONS, "A", "-x", "--token", "-n7", "0", ""]), min_size=1),
    st.lists(st.sampled_from([*OPTIONS, "A", "0", "--"])),
)
def test_no_error_repeats_a_value_behind_an_equals_sign(
    command: str, names: list[str], others: list[str]
) -> None:
    line = shlex.join([*(f"{name}={SECRET}" for name in names), *others])
    for words in (line, shlex.join(others) + " " + line):
        assert "hunter2" not in refusal(command, words)


TYPED = "hf_typed81q7wLm0"


@pytest.mark.parametrize(
    "line",
    [
        f"env AWS_* HF_TOKEN='{TYPED} and more'",
        f'env "HF_TOKEN={TYPED}',
        f"env HF_TOKEN = {TYPED}",
        f"start -n 2 --env=HF_TOKEN={TYPED}",
    ],
)
def test_a_secret_that_is_typed_is_refused_and_not_repeated(line: str) -> None:
    with raises(OptionsError, "HF_TOKEN=...: name the variable only") as caught:
        arguments.parse(line)
    assert TYPED not in str(caught.value)


# ---- explained ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", PARSERS)
def test_the_help_of_a_command_explains_every_option_and_value(command: str) -> None:
    parser = PARSERS[command]
    text = parser.format_help()
    assert text.startswith(f"usage: {parser.prog}")
    assert set(parser.option_names()) <= set(OPTION.findall(text))
    words = [str(word) for action in parser._actions for word in action.choices or ()]
    if command != "help":  # its words are in the overview
        assert all(re.search(rf"\b{word}\b", text) for word in words)
    assert all(action.help for action in parser._actions)
    assert max(map(len, text.splitlines())) <= 100
