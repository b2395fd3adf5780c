"""`%gpupool?` and `%%spmd?` say everything that the parsers take, and nothing else."""

from __future__ import annotations

import re

import pytest

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser
from gpupool.notebook.magics.commands import Commands
from gpupool.notebook.magics.magics import GpupoolMagics
from gpupool.notebook.magics.parser import MagicParser

_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
MANUAL = GpupoolMagics.gpupool.__doc__ or ""


def sections() -> dict[str, str]:
    """Command -> what the help says of it: from its line to that of the next one."""
    parts = re.split(r"^ *%gpupool \[?(\w+)\]?", MANUAL, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def values(parser: MagicParser) -> list[str]:
    """The words that some option or argument must be one of."""
    return [str(word) for action in parser._actions for word in action.choices or ()]


def test_every_command_has_its_section() -> None:
    assert sorted(sections()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_section_names_every_option_and_value_and_no_other(command: str) -> None:
    parser, text = COMMANDS[command](), sections()[command]
    assert set(_OPTION.findall(text)) == set(parser.option_names())
    if command != "auto":  # whose --view is told of below %%spmd
        assert all(re.search(rf"\b{word}\b", text) for word in values(parser))


def test_the_help_of_a_cell_names_every_option_and_value_and_no_other() -> None:
    text = GpupoolMagics.spmd_cell.__doc__ or ""
    assert set(_OPTION.findall(text)) == set(spmd_parser().option_names())
    assert all(re.search(rf"\b{word}\b", text) for word in values(spmd_parser()))


def test_help_fits_a_terminal() -> None:
    lines = MANUAL.splitlines()
    assert max(map(len, lines)) <= 100
    assert MANUAL.count("`") % 2 == 0


def test_every_command_is_done_by_something() -> None:
    assert sorted(Commands(None, "").names) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("strat", "Did you mean 'start'?"),
        ("stat", "Did you mean 'start'?"),
        ("statsu", "Did you mean 'status'?"),
        ("restrat", "Did you mean 'restart'?"),
        ("gpu", "Did you mean 'gpus'?"),
        ("logs", "Did you mean 'log'?"),
        ("shutdown", "Did you mean 'stop'?"),
        ("chekc", "Did you mean 'check'?"),
        ("--help", "Did you mean 'help'?"),
        ("parpool", "Did you mean 'start'?"),
        ("xyzzy", "There are: status, start, stop, restart, "),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Commands(None, "").run(word)
    assert str(caught.value).startswith(f"%gpupool has no command {word!r}. {hint}")
