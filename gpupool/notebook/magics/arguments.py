"""What may stand on a magic's line. Runs on the client.

Defaults come from the option classes; what is wrong raises `OptionsError` with one sentence.
"""

from __future__ import annotations

import argparse
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from gpupool.core.errors import OptionsError
from gpupool.core.options.pool_options import (
    BACKENDS,
    ON_HANG,
    parse_duration_s,
    seconds_argument,
    suggest,
)
from gpupool.notebook.magics.parser import MagicParser
from gpupool.spmd.cell import VIEWS

WATCH_EVERY_S = 1.0


def start_parser() -> MagicParser:
    """%gpupool start"""
    parser = MagicParser("%gpupool start")
    parser.add_argument("profile", nargs="?", metavar="PROFILE")
    parser.add_argument("-n", type=_whole, metavar="N")
    parser.add_argument("--gpus", metavar="GPUS")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--cpu", dest="device", action="store_const", const="cpu")
    parser.add_argument("--backend", type=_word_of(BACKENDS), choices=BACKENDS)
    parser.add_argument("--env", nargs="+", metavar="NAME")
    parser.add_argument("--idle-timeout", metavar="TIME")
    parser.add_argument("--timeout", dest="timeout_s", type=seconds_argument, metavar="SECONDS")
    parser.add_argument("--on-hang", type=_word_of(ON_HANG), choices=ON_HANG)
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
    parser.add_argument(
        "--watch",
        dest="every_s",
        nargs="?",
        const=WATCH_EVERY_S,
        default=None,
        type=seconds_argument,
        metavar="SECONDS",
    )
    return parser


def log_parser() -> MagicParser:
    """%gpupool log"""
    parser = MagicParser("%gpupool log")
    parser.add_argument("rank", nargs="?", default="0", metavar="RANK")
    parser.add_argument("-n", dest="num_lines", type=_count, default=50, metavar="LINES")
    return parser


def debug_parser() -> MagicParser:
    """%gpupool debug"""
    parser = MagicParser("%gpupool debug")
    parser.add_argument("rank", nargs="?", default=None, metavar="RANK")
    return parser


def check_parser() -> MagicParser:
    """%gpupool check"""
    from gpupool.check import command  # `%load_ext gpupool` does not wait for it

    parser = MagicParser("%gpupool check")
    command.add_options(parser)
    return parser


def restart_parser() -> MagicParser:
    """%gpupool restart"""
    parser = MagicParser("%gpupool restart")
    parser.add_argument("ranks", nargs="?", default="all", metavar="RANKS")
    return parser


def sync_parser() -> MagicParser:
    """%gpupool sync"""
    parser = MagicParser("%gpupool sync")
    parser.add_argument("rank", nargs="?", type=int, metavar="RANK", default=None)
    parser.add_argument("variables", nargs="*", type=_variable_name, metavar="NAME", default=[])
    parser.add_argument("-t", "--targets", dest="ranks", default=None, metavar="RANKS")
    parser.add_argument("--force", action="store_true", default=False)
    return parser


def auto_parser() -> MagicParser:
    """%gpupool auto"""
    parser = MagicParser("%gpupool auto")
    parser.add_argument(
        "state", nargs="?", type=_word_of(("on", "off")), choices=("on", "off"), default=None
    )
    parser.add_argument("-t", "--targets", dest="ranks", default=None, metavar="RANKS")
    parser.add_argument("--view", type=_word_of(VIEWS), choices=VIEWS, default=None)
    parser.add_argument(
        "--timeout", dest="timeout_s", type=seconds_argument, default=None, metavar="SECONDS"
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
        name = given[0].split()[0]
        raise OptionsError(
            f"%gpupool auto: {name} belongs to `%gpupool auto on`.", "no effect", name
        )
    chosen.options = " ".join(given)
    return chosen


def bare_parser(command: str) -> Callable[[], MagicParser]:
    """The parser of a command without arguments."""
    return lambda: MagicParser(f"%gpupool {command}")


@cache  # it is wanted for every cell, and takes half a millisecond
def spmd_parser() -> MagicParser:
    """%%spmd"""
    parser = MagicParser("%%spmd")
    parser.add_argument("-t", "--targets", dest="ranks", default="all", metavar="RANKS")
    parser.add_argument(
        "-o", "--out", dest="name", type=_variable_name, default=None, metavar="NAME"
    )
    parser.add_argument("--view", type=_word_of(VIEWS), choices=VIEWS, default="auto")
    parser.add_argument(
        "--timeout", dest="timeout_s", type=seconds_argument, default=None, metavar="SECONDS"
    )
    parser.add_argument("--nowait", action="store_true", default=False)
    parser.add_argument("--isolate", action="store_true", default=False)
    parser.add_argument("--no-sync", action="store_true", default=False)
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
    "env": env_parser,
    "log": log_parser,
    "debug": debug_parser,
    "check": check_parser,
    "help": bare_parser("help"),
}
"""The commands of %gpupool and what may follow each."""


# A type and not only `choices`, whose error lists all words and names none as the nearest.
def _word_of(words: Sequence[str]) -> Callable[[str], str]:
    """The type of an argument that is one of some words; an error names the nearest."""

    def word_of(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown. {suggest(text, words)}")
        return text

    return word_of


def _duration(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except OptionsError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    # "never" is None as a duration, and infinity as a limit.
    return math.inf if seconds is None else seconds


def _whole(text: str) -> int:
    return int(text)


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
_count.__name__ = "number"
_whole.__name__ = "whole number"
