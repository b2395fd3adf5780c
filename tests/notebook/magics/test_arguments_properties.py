"""Whatever stands on a magic's line is understood as written, or answered with one sentence."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser

PARSERS = {**COMMANDS, "%%spmd": spmd_parser}
OPTIONS = sorted({name for make in PARSERS.values() for name in make().option_names()})


def refusal(command: str, line: str) -> str:
    """What is wrong with a line; "" if nothing is."""
    try:
        PARSERS[command]().parse_line(line)
    except OptionsError as error:
        return str(error)
    return ""


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
