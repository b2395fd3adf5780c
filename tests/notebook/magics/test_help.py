"""`%gpupool?`, `%gpupool start -h` and `%%spmd?` explain all that the parsers take."""

from __future__ import annotations

import re

import pytest

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics.arguments import COMMANDS, SUMMARIES, overview, spmd_parser
from gpupool.notebook.magics.commands import Commands
from gpupool.notebook.magics.magics import GpupoolMagics
from gpupool.notebook.magics.parser import MagicParser

_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def values(parser: MagicParser) -> list[str]:
    """The words that some option or argument must be one of."""
    return [str(word) for action in parser._actions for word in action.choices or ()]


def test_the_overview_names_every_command_with_a_sentence() -> None:
    text = GpupoolMagics.gpupool.__doc__ or ""
    assert re.findall(r"(?m)^%gpupool \[?(\w+)\]? +[A-Z].*\.$", text) == list(COMMANDS)
    assert text == overview()
    assert len(text.splitlines()) < 25


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_every_option_and_value(command: str) -> None:
    parser = COMMANDS[command]()
    text = parser.manual()
    assert text.startswith(f"%gpupool {command}")
    assert SUMMARIES[command].split()[0] in text
    assert set(parser.option_names()) <= set(_OPTION.findall(text))
    if command != "help":  # its words are in the overview
        assert all(re.search(rf"\b{word}\b", text) for word in values(parser))
    assert all(action.help for action in parser._actions)
    assert max(map(len, text.splitlines())) <= 100


def test_the_help_of_a_cell_names_every_option_and_value_and_no_other() -> None:
    text = GpupoolMagics.spmd_cell.__doc__ or ""
    assert set(_OPTION.findall(text)) == set(spmd_parser().option_names())
    assert all(re.search(rf"\b{word}\b", text) for word in values(spmd_parser()))


@pytest.mark.parametrize("line", ["start -h", "start --help", "start -n 2 -h", "help start"])
def test_help_of_a_command_is_asked_for_in_each_usual_way(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Commands(None).run(line)
    shown = capsys.readouterr().out
    assert shown == COMMANDS["start"]().manual() + "\n"
    assert "--idle-timeout TIME" in shown
    assert "One rank per GPU" in shown or "one rank per GPU" in shown


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("strat", "Did you mean 'start'?"),
        ("shutdown", "Did you mean 'stop'?"),
        ("xyzzy", "There are: status, start, stop, restart, "),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Commands(None).run(word)
    assert str(caught.value).startswith(f"%gpupool has no command {word!r}. {hint}")
