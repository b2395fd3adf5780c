"""Whatever stands on a magic's line is understood as written, or answered with one sentence."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.core.options.pool_options import BACKENDS, ON_HANG
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser
from gpupool.spmd.cell import VIEWS

PARSERS = {**COMMANDS, "%%spmd": spmd_parser}
OPTIONS = sorted({name for make in PARSERS.values() for name in make().option_names()})
WORD = st.text(min_size=1).filter(lambda word: not word.startswith("-"))
SECONDS = st.floats(0.001, 1e6)
RANKS = st.sampled_from(["all", "0", "0,2", "0:4", "-1", "-1,0", "-2:", "::2"])

# the command -> its options: what is written in front of the value (None: no value), the name and
# the values it may have
FLAG = st.just(True)
VALID: dict[str, dict[str, tuple[str, st.SearchStrategy[Any]]]] = {
    "status": {},
    "stop": {},
    "interrupt": {},
    "start": {
        "": ("profile", WORD),
        "-n": ("n", st.integers()),
        "--gpus": ("gpus", WORD),
        "--force": ("force", FLAG),
        "--cpu": ("device", st.just("cpu")),
        "--backend": ("backend", st.sampled_from(BACKENDS)),
        "--idle-timeout": ("idle_timeout", WORD),
        "--on-hang": ("on_hang", st.sampled_from(ON_HANG)),
        "--hang-after": ("hang_after_s", SECONDS),
        "--timeout": ("timeout_s", SECONDS),
        "--env": ("env", st.lists(WORD, min_size=1)),
    },
    "restart": {"": ("ranks", RANKS)},
    "sync": {"-t": ("ranks", RANKS), "": ("rank", st.integers(0))},
    "debug": {"": ("rank", RANKS)},
    "gpus": {},
    "help": {},
    "env": {
        "--aws": ("aws", FLAG),
        "--unset": ("unset", FLAG),
        "": ("names", st.lists(WORD, min_size=1)),
    },
    "log": {"": ("rank", RANKS), "-n": ("num_lines", st.integers(1))},
    "%%spmd": {
        "-t": ("ranks", RANKS),
        "--out": ("name", st.from_regex("[a-z]_[0-9]*", fullmatch=True)),
        "--view": ("view", st.sampled_from(VIEWS)),
        "--timeout": ("timeout_s", SECONDS),
        "--nowait": ("nowait", FLAG),
        "--isolate": ("isolate", FLAG),
        "--no-sync": ("no_sync", FLAG),
    },
}
WITHOUT_VALUE = {"--force", "--cpu", "--aws", "--unset"}
WITHOUT_VALUE |= {"--nowait", "--isolate", "--no-sync"}


def refusal(command: str, line: str) -> str:
    """What is wrong with a line; "" if nothing is."""
    try:
        PARSERS[command]().parse_line(line)
    except OptionsError as error:
        return str(error)
    return ""


def test_every_command_and_option_is_tried() -> None:
    assert set(VALID) == set(PARSERS)
    assert {option for options in VALID.values() for option in options if option} == {
        option for option in OPTIONS if option not in ("--targets", "-o")
    }


@st.composite
def lines(draw: st.DrawFn, command: str) -> tuple[str, dict[str, Any]]:
    """A line of valid arguments, in any order, and what it means."""
    meaning: dict[str, Any] = {}
    parts: list[list[str]] = []
    last: list[str] = []
    for option, (name, values) in VALID[command].items():
        if not draw(st.booleans()):
            continue
        value = meaning[name] = draw(values)
        if isinstance(value, list):  # takes all that follows
            last = [option, *value] if option else value
        elif option in WITHOUT_VALUE:
            parts.append([option])
        elif option.startswith("--") and draw(st.booleans()):
            parts.append([f"{option}={value}"])
        else:
            parts.append([option, str(value)] if option else [str(value)])
    words = [word for part in draw(st.permutations(parts)) for word in part]
    return shlex.join(words + last), meaning


@pytest.mark.long
@pytest.mark.parametrize("command", PARSERS)
def test_valid_options_mean_what_was_written(command: str) -> None:
    defaults = vars(PARSERS[command]().parse_line(""))

    @given(lines(command))
    def check(line_and_meaning: tuple[str, dict[str, Any]]) -> None:
        line, meaning = line_and_meaning
        assert vars(PARSERS[command]().parse_line(line)) == defaults | meaning

    check()


@given(st.sampled_from(sorted(PARSERS)), st.text())
def test_any_text_is_parsed_or_refused_in_one_line(command: str, text: str) -> None:
    name = command if command == "%%spmd" else f"%gpupool {command}"
    assert refusal(command, text).startswith(name) or not refusal(command, text)


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
