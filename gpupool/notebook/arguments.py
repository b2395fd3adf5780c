"""What may stand on a magic's line. Runs on the client.

argparse does the parsing; here it raises `OptionsError` with one sentence instead of ending the
process, and defaults come from the option classes.
"""

from __future__ import annotations

import argparse
import keyword
import math
import re
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from typing import NoReturn

from gpupool.core.errors import OptionsError
from gpupool.core.options import BACKENDS, ON_HANG, parse_duration_s, suggest
from gpupool.spmd.cell import VIEWS


class MagicParser(argparse.ArgumentParser):
    """An argument parser whose errors are `OptionsError`s that say what is allowed."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            add_help=False,
            # an unset option is left out, so that the option class's default counts
            argument_default=argparse.SUPPRESS,
        )
        # argparse takes -1 for a value and -1,0 for an option; in ranks both are values
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        raise OptionsError(f"{self.prog}: {message}. Usage: {self._usage()}")

    def parse_line(self, line: str) -> argparse.Namespace:
        """The arguments on a magic's line, split as a shell does."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise OptionsError(f"{self.prog}: {error}.") from None
        try:
            parsed, unknown = self.parse_known_args(words)
        except OptionsError as error:
            raise OptionsError(_without_values(str(error), words)) from None
        if unknown:
            raise OptionsError(self._what_is_wrong_with(unknown))
        return parsed

    def _what_is_wrong_with(self, words: list[str]) -> str:
        options = [word.split("=")[0] for word in words if word.startswith("-")]
        known = self.option_names()
        if options and known:
            return f"{self.prog} has no option {options[0]}. {suggest(options[0], known)}"
        message = f"{self.prog}: {words[0]!r} is too much. Usage: {self._usage()}"
        return _without_values(message, words)

    def option_names(self) -> list[str]:
        """All options in all spellings that a user may write."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings]

    def values_of(self, option: str) -> tuple[str, ...] | None:
        """What may follow an option: the fixed words, () if it is free, None if nothing does."""
        for action in self._actions:
            if option in action.option_strings and action.nargs != 0:
                return tuple(map(str, action.choices or ()))
        return None

    def _usage(self) -> str:
        return " ".join(self.format_usage().removeprefix("usage: ").split())


def start_parser() -> MagicParser:
    """%gpupool start"""
    parser = MagicParser("%gpupool start")
    parser.add_argument("profile", nargs="?")
    parser.add_argument("-n", type=int, metavar="N")
    parser.add_argument("--gpus")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--cpu", dest="device", action="store_const", const="cpu")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--env", nargs="+", metavar="NAME")
    parser.add_argument("--idle-timeout")
    parser.add_argument("--timeout", dest="timeout_s", type=_seconds, metavar="SECONDS")
    parser.add_argument("--on-hang", choices=ON_HANG)
    parser.add_argument("--hang-after", dest="hang_after_s", type=_duration, metavar="TIME")
    parser.add_argument("--inline", action="store_true")
    return parser


def env_parser() -> MagicParser:
    """%gpupool env"""
    parser = MagicParser("%gpupool env")
    parser.add_argument("names", nargs="*", metavar="NAME", default=[])
    parser.add_argument("--aws", action="store_true", default=False)
    parser.add_argument("--unset", action="store_true", default=False)
    return parser


def gpus_parser() -> MagicParser:
    """%gpupool gpus"""
    parser = MagicParser("%gpupool gpus")
    parser.add_argument("--watch", action="store_true", default=False)
    return parser


def log_parser() -> MagicParser:
    """%gpupool log"""
    parser = MagicParser("%gpupool log")
    parser.add_argument("rank", nargs="?", default="0")
    parser.add_argument("-n", dest="num_lines", type=_count, default=50, metavar="LINES")
    return parser


def debug_parser() -> MagicParser:
    """%gpupool debug"""
    parser = MagicParser("%gpupool debug")
    parser.add_argument("rank", nargs="?", default=None)
    return parser


def restart_parser() -> MagicParser:
    """%gpupool restart"""
    parser = MagicParser("%gpupool restart")
    parser.add_argument("ranks", nargs="?", default="all")
    return parser


def sync_parser() -> MagicParser:
    """%gpupool sync"""
    parser = MagicParser("%gpupool sync")
    parser.add_argument("rank", nargs="?", type=int, metavar="RANK", default=None)
    parser.add_argument("names", nargs="*", type=_variable_name, metavar="NAME", default=[])
    parser.add_argument("-t", "--targets", dest="ranks", default=None)
    return parser


def auto_parser() -> MagicParser:
    """%gpupool auto"""
    parser = MagicParser("%gpupool auto")
    parser.add_argument("state", nargs="?", choices=("on", "off"), default=None)
    parser.add_argument("-t", "--targets", dest="ranks", default=None)
    parser.add_argument("--view", choices=VIEWS, default=None)
    parser.add_argument(
        "--timeout", dest="timeout_s", type=_seconds, default=None, metavar="SECONDS"
    )
    return parser


def auto_options(line: str) -> argparse.Namespace:
    """What stands after `%gpupool auto`; `options` is what to write after %%spmd.

    Raises:
        OptionsError: options without "on".
    """
    chosen = auto_parser().parse_line(line)
    timeout = None if chosen.timeout_s is None else f"{chosen.timeout_s:g}"
    named = {"-t": chosen.ranks, "--view": chosen.view, "--timeout": timeout}
    given = [f"{name} {value}" for name, value in named.items() if value is not None]
    if given and chosen.state != "on":
        raise OptionsError(f"%gpupool auto: {given[0].split()[0]} belongs to `%gpupool auto on`.")
    chosen.options = " ".join(given)
    return chosen


def leftovers_parser() -> MagicParser:
    """%gpupool leftovers"""
    parser = MagicParser("%gpupool leftovers")
    parser.add_argument("--reap", action="store_true", default=False)
    return parser


def bare_parser(command: str) -> Callable[[], MagicParser]:
    """The parser of a command without arguments."""
    return lambda: MagicParser(f"%gpupool {command}")


@cache  # it is wanted for every cell, and takes half a millisecond
def spmd_parser() -> MagicParser:
    """%%spmd"""
    parser = MagicParser("%%spmd")
    parser.add_argument("-t", "--targets", dest="ranks", default="all")
    parser.add_argument("-o", "--out", dest="name", type=_variable_name, default=None)
    parser.add_argument("--view", choices=VIEWS, default="auto")
    parser.add_argument(
        "--timeout", dest="timeout_s", type=_seconds, default=None, metavar="SECONDS"
    )
    parser.add_argument("--nowait", action="store_true", default=False)
    parser.add_argument("--isolate", action="store_true", default=False)
    # put there by `%gpupool auto on`, never by a user
    parser.add_argument("--auto", action="store_true", default=False, help=argparse.SUPPRESS)
    return parser


COMMANDS: Mapping[str, Callable[[], MagicParser]] = {
    "status": bare_parser("status"),
    "start": start_parser,
    "stop": bare_parser("stop"),
    "restart": restart_parser,
    "sync": sync_parser,
    "interrupt": bare_parser("interrupt"),
    "gpus": gpus_parser,
    "auto": auto_parser,
    "leftovers": leftovers_parser,
    "env": env_parser,
    "log": log_parser,
    "debug": debug_parser,
}
"""The commands of %gpupool and what may follow each."""


def _without_values(message: str, words: list[str]) -> str:
    """A message without the values behind "=": they may be secrets, and errors are kept."""
    for word in words:
        _, sign, value = word.partition("=")
        if sign and value:
            # as a word, behind the letter of an option, and as the value of an option
            for shown in (word, word[2:], value):
                message = message.replace(repr(shown), repr(shown.removesuffix(value) + "..."), 1)
    return message


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _duration(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except OptionsError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    return math.inf if seconds is None else seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return count


def _variable_name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that a variable can have")
    return text


# argparse names the type in "invalid float value: 'x'"
_seconds.__name__, _count.__name__ = "number of seconds", "number"
