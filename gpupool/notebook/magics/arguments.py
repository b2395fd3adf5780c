"""What may stand on a magic's line. Runs on the client.

Defaults come from the option classes; what is wrong raises `OptionsError` with one sentence.
"""

from __future__ import annotations

import argparse
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import parse_duration_s, suggest
from gpupool.core.options.fields import words_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.notebook.magics.parser import MagicParser
from gpupool.spmd.cell import VIEWS

SUMMARIES: Mapping[str, str] = {
    "status": "Show what runs: state, ranks, devices, process ids; in a notebook with buttons.",
    "start": "Start the pool: one rank per GPU, or 2 CPU ranks on a machine without.",
    "stop": "End every process of the pool.",
    "restart": "Replace ranks by new ones, all of them unless named.",
    "sync": "Copy variables of one rank to the others.",
    "interrupt": "Interrupt the busy ranks; a training stops and keeps its network.",
    "hosts": "List the hosts of the pool: ranks, GPUs, addresses.",
    "gpus": "List the GPUs of this machine and who uses them.",
    "env": "Copy environment variables and AWS logins to the ranks.",
    "log": "Show the end of a rank's log.",
    "debug": "Open the debugger on a rank's last error.",
    "help": "Show this overview, or explain one command.",
}
"""The commands of %gpupool, in the order of the overview."""

_RANKS = "all (the default), 0, 0,2, 0:4, ::2 or -1"


def overview() -> str:
    """The help of %gpupool: a line for each command."""
    width = max(map(len, SUMMARIES)) + 2
    lines = [f"%gpupool {name:<{width}}{text}" for name, text in SUMMARIES.items()]
    lines[0] = lines[0].replace("status  ", "[status]", 1)
    return "\n".join(
        [
            "The pool of this notebook.",
            "",
            *lines,
            "",
            "`%gpupool start -h` explains start and its options; so does -h after any command.",
            "`%%spmd` above a cell runs it on every rank: `%%spmd?` explains it.",
        ]
    )


def start_parser() -> MagicParser:
    """%gpupool start"""
    parser = _parser(
        "start",
        "Returns when the process group is formed. `%%spmd` cells and trainings then run on it.",
    )
    parser.add_argument(
        "profile",
        nargs="?",
        metavar="PROFILE",
        help="where the ranks run: local, this machine; ssh, slurm, mpi, kubernetes, sky; a table "
        "of gpupool.toml. What is behind -- goes to the scheduler: start slurm -n 16 -- -p gpu",
    )
    parser.add_argument("--hosts", metavar="HOSTS", help="of ssh, such as gpu1,gpu2:4 (4 ranks)")
    parser.add_argument(
        "-n",
        type=_whole,
        metavar="N",
        help="number of ranks; those beyond the GPUs run cells and do not train",
    )
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        help="the GPUs to use, such as 0,2: indices, UUIDs, or MIG instances such as 0:1",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also take GPUs that another pool has or another user computes on",
    )
    parser.add_argument(
        "--cpu",
        dest="device",
        action="store_const",
        const="cpu",
        help="use no GPU",
    )
    parser.add_argument(
        "--backend",
        type=_word_of(words_of(PoolOptions, "backend")),
        choices=words_of(PoolOptions, "backend"),
        help="auto (the default): nccl among ranks that have a GPU each, else gloo",
    )
    parser.add_argument(
        "--env",
        nargs="+",
        metavar="NAME",
        help="environment variables for the ranks, as `%%gpupool env` copies them",
    )
    parser.add_argument(
        "--idle-timeout",
        metavar="TIME",
        help="shut down after this time without use: 90s, 30m (the default), 2h, never",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=_seconds,
        metavar="SECONDS",
        help="give up starting after this many seconds: 60",
    )
    parser.add_argument(
        "--on-hang",
        type=_word_of(words_of(PoolOptions, "on_hang")),
        choices=words_of(PoolOptions, "on_hang"),
        help="when ranks wait for each other without end. tell (the default): show below the "
        "running cell where each rank is; abort: end the cell as well; variables stay",
    )
    parser.add_argument(
        "--hang-after",
        dest="hang_after_s",
        type=_duration,
        metavar="TIME",
        help="how long ranks may wait before that counts as a hang: 30s (the default), 5m, never",
    )
    return parser


def start_options(line: str) -> dict[str, Any]:
    """The options on a line of %gpupool start; `words` are what is behind "--"."""
    line, _, words = f" {line} ".partition(" -- ")
    return {**vars(start_parser().parse_line(line)), "words": words}


def stop_parser() -> MagicParser:
    """%gpupool stop"""
    parser = _parser("stop")
    words = "also end machines that were rented for it, and would wait for another pool"
    parser.add_argument("--down", action="store_true", default=False, help=words)
    return parser


def env_parser() -> MagicParser:
    """%gpupool env"""
    parser = _parser(
        "env",
        "Values are never shown. Without arguments: list the variables that the ranks have.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        default=[],
        help="names or patterns of the notebook's variables, such as HF_TOKEN or AWS_*",
    )
    parser.add_argument(
        "--aws",
        action="store_true",
        default=False,
        help="send the login of this notebook's AWS profile, SSO or role; renewed before it "
        "expires",
    )
    parser.add_argument(
        "--unset", action="store_true", default=False, help="remove the variables from the ranks"
    )
    return parser


def log_parser() -> MagicParser:
    """%gpupool log"""
    parser = _parser("log", "It has what a rank printed outside of cells.")
    parser.add_argument("rank", nargs="?", default="0", metavar="RANK", help="0 unless given")
    parser.add_argument(
        "-n", dest="num_lines", type=_count, default=50, metavar="LINES", help="50 unless given"
    )
    return parser


def debug_parser() -> MagicParser:
    """%gpupool debug"""
    parser = _parser(
        "debug", "In it: p x, up, down, w, l, !x = 1. q ends it. Variables can be changed."
    )
    parser.add_argument(
        "rank",
        nargs="?",
        default=None,
        metavar="RANK",
        help="the rank that failed first, unless given",
    )
    return parser


def restart_parser() -> MagicParser:
    """%gpupool restart"""
    parser = _parser("restart", "The other ranks keep their variables.")
    parser.add_argument("ranks", nargs="?", default="all", metavar="RANKS", help=_RANKS)
    return parser


def sync_parser() -> MagicParser:
    """%gpupool sync"""
    parser = _parser(
        "sync", "After a restart of rank 1: `%gpupool sync 0 model optimizer scheduler`."
    )
    parser.add_argument(
        "rank", nargs="?", type=int, metavar="RANK", default=None, help="the rank to copy from"
    )
    parser.add_argument(
        "variables",
        nargs="*",
        type=_variable_name,
        metavar="NAME",
        default=[],
        help="variables; name together what belongs together",
    )
    parser.add_argument(
        "-t",
        "--targets",
        dest="ranks",
        default=None,
        metavar="RANKS",
        help=f"copy to these ranks only: {_RANKS}",
    )
    return parser


def help_parser() -> MagicParser:
    """%gpupool help"""
    parser = _parser("help")
    parser.add_argument(
        "command",
        nargs="?",
        type=_word_of((*SUMMARIES, "spmd")),
        choices=(*SUMMARIES, "spmd"),
        metavar="COMMAND",
        default=None,
        help="a command, or spmd",
    )
    return parser


def _parser(command: str, more: str = "") -> MagicParser:
    return MagicParser(f"%gpupool {command}", f"{SUMMARIES[command]} {more}".rstrip())


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
        "--timeout", dest="timeout_s", type=_seconds, default=None, metavar="SECONDS"
    )
    parser.add_argument("--nowait", action="store_true", default=False)
    parser.add_argument("--isolate", action="store_true", default=False)
    parser.add_argument("--no-sync", action="store_true", default=False)
    return parser


COMMANDS: Mapping[str, Callable[[], MagicParser]] = {
    **{name: partial(_parser, name) for name in SUMMARIES},  # those without arguments stay so
    "start": start_parser,
    "stop": stop_parser,
    "restart": restart_parser,
    "sync": sync_parser,
    "env": env_parser,
    "log": log_parser,
    "debug": debug_parser,
    "help": help_parser,
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


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


_seconds.__name__ = "number of seconds"  # argparse names the type in its errors


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
