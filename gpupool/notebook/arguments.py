"""What may stand on a magic's line. Runs on the client.

argparse does the parsing; here it raises `OptionsError` with one sentence instead of ending the
process, and defaults come from the option classes.
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import NoReturn

from gpupool.core.errors import OptionsError
from gpupool.core.options import BACKENDS, suggest
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

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", message)
        if not unknown:
            raise OptionsError(f"{self.prog}: {message}. Usage: {self._usage()}")
        words = unknown[1].split()
        options = [word for word in words if word.startswith("-")]
        known = [name for action in self._actions for name in action.option_strings]
        if options and known:
            raise OptionsError(
                f"{self.prog} has no option {options[0]}. {suggest(options[0], known)}"
            )
        raise OptionsError(f"{self.prog}: {words[0]!r} is too much. Usage: {self._usage()}")

    def parse_line(self, line: str) -> argparse.Namespace:
        """The arguments on a magic's line, split as a shell does."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise OptionsError(f"{self.prog}: {error}.") from None
        return self.parse_args(words)

    def _usage(self) -> str:
        return " ".join(self.format_usage().removeprefix("usage: ").split())


def start_parser() -> MagicParser:
    """%gpupool start"""
    parser = MagicParser("%gpupool start")
    parser.add_argument("profile", nargs="?")
    parser.add_argument("-n", type=int)
    parser.add_argument("--gpus")
    parser.add_argument("--cpu", dest="device", action="store_const", const="cpu")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--env", nargs="+", metavar="NAME")
    parser.add_argument("--idle-timeout")
    parser.add_argument("--timeout", dest="timeout_s", type=float, metavar="SECONDS")
    return parser


def env_parser() -> MagicParser:
    """%gpupool env"""
    parser = MagicParser("%gpupool env")
    parser.add_argument("names", nargs="*", metavar="NAME", default=[])
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
    parser.add_argument("-n", dest="num_lines", type=int, default=50, metavar="LINES")
    return parser


def bare_parser(command: str) -> MagicParser:
    """A command without arguments."""
    return MagicParser(f"%gpupool {command}")


def spmd_parser() -> MagicParser:
    """%%spmd"""
    parser = MagicParser("%%spmd")
    parser.add_argument("-t", "--targets", dest="ranks", default="all")
    parser.add_argument("-o", "--out", dest="name", default=None)
    parser.add_argument("--view", choices=VIEWS, default="auto")
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--nowait", action="store_true", default=False)
    return parser
