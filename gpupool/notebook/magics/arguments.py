"""What may stand on a magic's line. Runs on the client.

Defaults come from the option classes; what is wrong raises `OptionsError` with one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import keyword
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import parse_duration_s, suggest
from gpupool.core.options.fields import words_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.terminal import plain
from gpupool.spmd.cell import VIEWS

_RANKS = "all (the default), 0, 0,2, 0:4, ::2 or -1"
_HELP = {"-h", "--help"}
_TYPED = re.compile(r"(?<![\w-])([A-Za-z_]\w*)\s?=\s*\S")

# argparse repeats the value of an option that takes none.
_REPEATED = re.compile("ignored explicit argument .*", re.DOTALL)


_formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=96)


class MagicParser(argparse.ArgumentParser):
    """An argument parser whose errors are `OptionsError`s that say what is allowed.

    They repeat no value: it may be a secret, and a notebook keeps its errors. So do the types of
    arguments.
    """

    def __init__(self, prog: str, **how: Any) -> None:
        how = {"allow_abbrev": False, "add_help": False, "formatter_class": _formatter, **how}
        super().__init__(prog, **how)
        self.color = False  # which Python has from 3.14 on
        # argparse takes -1 for a value and -1,0 for an option; in ranks both are values
        self._negative_number_matcher = re.compile(r"-\d")

    def split(self, line: str) -> list[str]:
        try:
            return shlex.split(line)
        except ValueError as error:
            raise OptionsError(f"{self.prog}: {error}.") from None

    def parse_line(self, line: str) -> argparse.Namespace:
        return self.parse_args(self.split(line))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, but no word may be left; each command answers for its own."""
        parsed, unknown = super().parse_known_args(args, namespace)
        words = [word.partition("=")[0] for word in unknown]
        options = [word for word in words if word.startswith("-")]
        if options and (known := self.option_names()):
            sentence = f"{self.prog} has no option {options[0]}. {suggest(options[0], known)}"
            raise OptionsError(plain(sentence))
        if words:
            self.error(f"{words[0]!r} is too much")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        sentence = _REPEATED.sub("it takes no value", message)
        end = "" if sentence.endswith(("?", ".")) else "."
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise OptionsError(plain(f"{self.prog}: {sentence}{end} Usage: {usage}")) from None

    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def parse(line: str) -> argparse.Namespace:
    """The command on a line of %gpupool, and its arguments; `words` of start are behind "--"."""
    _refuse_typed_value(line.partition(" -- ")[0])
    words = GPUPOOL.split(line) or ["status"]
    command = "help" if words[0] in _HELP else words[0]
    if command not in COMMANDS:
        hint = suggest(command, COMMANDS)
        raise OptionsError(f"%gpupool has no command {command.partition('=')[0]!r}. {hint}")
    end = words.index("--") if command == "start" and "--" in words else len(words)
    if not _HELP.isdisjoint(words[:end]):
        return argparse.Namespace(command="help", topic=command if command != "help" else None)
    chosen = GPUPOOL.parse_args(words[:end])
    if command == "start":
        chosen.words = words[end + 1 :]
    return chosen


def _refuse_typed_value(line: str) -> None:
    if typed := _TYPED.search(line):
        raise OptionsError(
            f"{typed[1]}=...: name the variable only, its value is taken from the notebook's "
            f'environment: os.environ["{typed[1]}"] = getpass.getpass() asks for it and keeps it '
            "nowhere else. The typed value is still in this cell and in IPython's history: delete "
            "it there, or replace the secret."
        )


def _gpupool_parser() -> tuple[MagicParser, Mapping[str, MagicParser]]:
    """%gpupool, and its commands in the order of the overview."""
    parser = MagicParser(
        "%gpupool",
        usage="%(prog)s [COMMAND]",
        description="The pool of this notebook.",
        epilog="`%gpupool start -h` explains start and its options; so does -h after any command.\n"
        "`%%spmd` above a cell runs it on every rank: `%%spmd?` explains it.",
    )
    commands = parser.add_subparsers(
        prog=parser.prog,
        dest="command",
        title="commands",
        metavar="COMMAND ...",
        help="status unless given",
    )

    def command(name: str, summary: str, more: str = "", **how: Any) -> MagicParser:
        about = f"{summary}\n{more}".rstrip()
        return commands.add_parser(name, help=summary, description=about, **how)

    command("status", "Show the pool: state, ranks, devices, pids; in a notebook with buttons.")
    _add_start(command)
    add = command("stop", "End every process of the pool.").add_argument
    add("--down", action="store_true", help="also end machines that were rented for it")
    more = "The other ranks keep their variables."
    add = command(
        "restart", "Replace ranks by new ones, all of them unless named.", more
    ).add_argument
    add("ranks", nargs="?", default="all", metavar="RANKS", help=_RANKS)
    more = "After a restart of rank 1: `%gpupool sync 0 model optimizer scheduler`."
    add = command("sync", "Copy variables of one rank to the others.", more).add_argument
    add("rank", type=_whole, metavar="RANK", help="the rank to copy from")
    names = "variables; name together what belongs together"
    add("variables", nargs="+", type=_variable_name, metavar="NAME", help=names)
    add("-t", "--targets", dest="ranks", metavar="RANKS", help=f"copy to these only: {_RANKS}")
    command("interrupt", "Interrupt the busy ranks; a training stops and keeps its network.")
    command("hosts", "List the hosts of the pool: ranks, GPUs, addresses.")
    command("gpus", "List the GPUs of this machine and who uses them.")
    more = "Values are never shown. Without arguments: list the variables that the ranks have."
    about = "Copy environment variables and AWS logins to the ranks."
    add = command("env", about, more).add_argument
    names = "names or patterns of the notebook's variables, such as HF_TOKEN or AWS_*"
    add("names", nargs="*", metavar="NAME", help=names)
    aws = "send the login of this notebook's AWS profile, SSO or role; renewed before it expires"
    add("--aws", action="store_true", help=aws)
    add("--unset", action="store_true", help="remove the variables from the ranks")
    more = "It has what a rank printed outside of cells."
    add = command("log", "Show the end of a rank's log.", more).add_argument
    add("rank", nargs="?", default="0", metavar="RANK", help="0 unless given")
    add("-n", type=_above_0, default=50, metavar="N", help="so many lines; 50 unless given")
    about = "Say why the last training is slow, and what to do; before any, look at the machine."
    more = "With a folder's URL it also measures how fast all ranks read there, with their keys."
    add = command("doctor", about, more).add_argument
    add("place", nargs="?", default="", metavar="URL|machine", help="look at the machine")
    more = "In it: p x, up, down, w, l, !x = 1. q ends it. Variables can be changed."
    add = command("debug", "Open the debugger on a rank's last error.", more).add_argument
    add("rank", nargs="?", metavar="RANK", help="the rank that failed first, unless given")
    add = command("help", "Show this overview, or explain one command.").add_argument
    topics = _one_of((*commands.choices, "spmd"))
    add("topic", nargs="?", metavar="COMMAND", help="a command, or spmd", **topics)
    return parser, commands.choices


def _add_start(command: Callable[..., MagicParser]) -> None:
    start = command(
        "start",
        "Start the pool: one rank per GPU, or 2 CPU ranks on a machine without.",
        "Returns when the process group is formed. `%%spmd` cells and trainings then run on it.",
        usage="%(prog)s [PROFILE] [options] [-- WORDS]",
        # an unset option is left out, so that the option class's default counts
        argument_default=argparse.SUPPRESS,
    )
    add = start.add_argument_group("where the ranks run").add_argument
    profile = (
        "local, this machine; ssh, slurm, mpi, kubernetes, sky; a table of gpupool.toml. "
        "What is behind -- goes to the scheduler: start slurm -n 16 -- -p gpu"
    )
    gpus = "the GPUs to use, such as 0,2: indices, UUIDs, or MIG instances such as 0:1"
    force = "also take GPUs that another pool has or another user computes on"
    backend = "auto (the default): nccl among ranks that have a GPU each, else gloo"
    num_ranks = "number of ranks; those beyond the GPUs run cells and do not train"
    add("profile", nargs="?", metavar="PROFILE", help=profile)
    add("--hosts", metavar="HOSTS", help="of ssh, such as gpu1,gpu2:4 (4 ranks)")
    add("-n", type=_whole, metavar="N", help=num_ranks)
    add("--gpus", metavar="GPUS", help=gpus)
    add("--force", action="store_true", help=force)
    add("--cpu", dest="device", action="store_const", const="cpu", help="use no GPU")
    add("--backend", help=backend, **_one_of(words_of(PoolOptions, "backend")))
    add = start.add_argument_group("what they have, and how long").add_argument
    env = "environment variables for the ranks, as `%%gpupool env` copies them"
    idle = "shut down after this time without use: 90s, 30m (the default), 2h, never"
    timeout = "give up starting after this many seconds: 60"
    on_hang = (
        "when ranks wait for each other without end. tell (the default): show below the running "
        "cell where each rank is; abort: end the cell as well; variables stay"
    )
    hang = "how long ranks may wait before that counts as a hang: 30s (the default), 5m, never"
    add("--env", nargs="+", metavar="NAME", help=env)
    add("--idle-timeout", metavar="TIME", help=idle)
    add("--timeout", dest="timeout_s", type=_seconds, metavar="SECONDS", help=timeout)
    add("--on-hang", help=on_hang, **_one_of(words_of(PoolOptions, "on_hang")))
    add("--hang-after", dest="hang_after_s", type=_duration, metavar="TIME", help=hang)


def _spmd_parser() -> MagicParser:
    parser = MagicParser(
        "%%spmd",
        description="Run the cell on every rank; the process group of torch.distributed is ready.",
        epilog="rank, world_size, local_rank, device, torch and dist are defined in the cell.\n"
        "The cell can use the notebook's variables. They are sent again when they have changed.\n"
        "What the cell assigns becomes a Composite in the notebook, a handle of each rank's\n"
        "value: x[rank], x.gather(), x.previous.\n"
        "`%spmd EXPRESSION` gives the value of an expression on each rank.",
    )
    add = parser.add_argument
    out = "bind the result: NAME[rank] is the last expression's value, NAME.text(rank) its output"
    view = "auto (the default): the end of the output, then equal ranks as one; quiet: nothing"
    nowait = "do not wait: the value, or NAME, is a handle: .done(), .result(), .interrupt(), await"
    no_sync = "end without waiting for what GPUs still compute; its errors appear in a later cell"
    seconds = "interrupt the ranks after that long"
    add("-t", "--targets", dest="ranks", default="all", metavar="RANKS", help=f"where: {_RANKS}")
    add("-o", "--out", dest="name", type=_variable_name, metavar="NAME", help=out)
    add("--view", default="auto", help=view, **_one_of(VIEWS))
    add("--timeout", dest="timeout_s", type=_seconds, metavar="SECONDS", help=seconds)
    add("--nowait", action="store_true", help=nowait)
    add("--isolate", action="store_true", help="send no variable and bring none back")
    add("--no-sync", action="store_true", help=no_sync)
    return parser


# ---- kinds of arguments; no error repeats what was given: see MagicParser --------------------


def _one_of(words: Sequence[str]) -> dict[str, Any]:
    """How an argument is added that is one of some words; an error names the nearest."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"there is no such word. {suggest(text, words)}")
        return text

    return {"type": word, "choices": words}


def _number(kind: Callable[[str], float], what: str, above: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if above < (value := kind(text)) < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"give {what}")

    return number


_whole = _number(int, "a whole number", -math.inf)
_above_0 = _number(int, "a whole number above 0", 0)
_seconds = _number(float, "a number of seconds above 0", 0)


def _duration(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except OptionsError:
        raise argparse.ArgumentTypeError("give a time: 90s, 30m, 2h or never") from None
    # "never" is None as a duration, and infinity as a limit.
    return math.inf if seconds is None else seconds


def _variable_name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError("give a name that a variable can have")
    return text


GPUPOOL, COMMANDS = _gpupool_parser()
SPMD = _spmd_parser()
