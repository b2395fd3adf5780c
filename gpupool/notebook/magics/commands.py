"""The commands of %gpupool: parse, call, display. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.display import display

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import suggest
from gpupool.notebook.magics import arguments, debug, typed_secrets
from gpupool.notebook.page.front_end import in_notebook
from gpupool.notebook.pool import host_table, pool_bar, tables
from gpupool.pool import session
from gpupool.pool.calls.presses import ignore_for_a_moment, ignored
from gpupool.pool.session import gpus

_MEANT = {  # words for the same that others use
    **dict.fromkeys(("shutdown", "kill", "quit", "delete", "close", "down"), "stop"),
    **dict.fromkeys(("up", "open", "launch", "create", "parpool"), "start"),
    **dict.fromkeys(("info", "ls", "list", "ps"), "status"),
    **dict.fromkeys(("devices", "nvidia-smi", "gpudevicetable"), "gpus"),
    **dict.fromkeys(("h", "?", "man", "help"), "help"),
}
_HELP = {"-h", "--help"}
_AFTER = {  # what an interrupted command has left
    "start": " Nothing was left running.",
    "restart": " It continues in the background.",
}
_NOT_RESTARTED = "The restart was not completed."


class Interrupted(KeyboardInterrupt):
    """The user has interrupted a magic; in IPython this shows as one line, without our frames."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback."""
        return [f"KeyboardInterrupt: {self}"]


class Commands:
    """What stands behind %gpupool, in one shell; `cell_help` is that of %%spmd."""

    def __init__(self, shell: Any, cell_help: str = "") -> None:
        self.shell = shell
        self._cell_help = cell_help
        self._commands: dict[str, Callable[[str], object]] = {
            "status": self._status,
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "sync": self._sync,
            "interrupt": self._interrupt,
            "hosts": self._hosts,
            "gpus": self._gpus,
            "env": self._env,
            "log": self._log,
            "debug": self._debug,
            "help": self._help,
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The commands there are."""
        return tuple(self._commands)

    def run(self, line: str) -> object:
        """Do what stands behind `%gpupool`; without a word, show the status.

        Raises:
            OptionsError: there is no such command, or its options are wrong.
            Interrupted: by the user.
        """
        word, _, rest = line.strip().partition(" ")
        word = word or "status"
        word = "help" if word in _HELP else word
        if word not in self._commands:
            meant = _MEANT.get(word.lower().lstrip("-"))
            hint = f"Did you mean {meant!r}?" if meant else suggest(word, self._commands)
            raise OptionsError(f"%gpupool has no command {word!r}. {hint}")
        if word in ("env", "start"):  # before anything is parsed, which would repeat it
            typed_secrets.refuse_typed_value(rest)
        if not _HELP.isdisjoint(rest.partition(" -- ")[0].split()):
            print(arguments.COMMANDS[word]().manual())
            return None
        try:
            return self._commands[word](rest)
        except KeyboardInterrupt:
            ignore_for_a_moment()
            raise Interrupted(f"%gpupool {word} was interrupted.{_AFTER.get(word, '')}") from None

    def _status(self, rest: str) -> None:
        arguments.COMMANDS["status"]().parse_line(rest)
        pool = session.find()
        if pool is None:
            print("No pool runs in this notebook. `%gpupool start` starts one.")
            return
        if in_notebook():
            pool_bar.show(pool)
        else:
            display(pool.status())

    def _start(self, rest: str) -> None:
        options = arguments.start_options(rest)
        with tables.StartProgress() as progress:
            pool = session.start(**options, progress=progress)
            progress.finish(pool)

    def _stop(self, rest: str) -> None:
        down = arguments.COMMANDS["stop"]().parse_line(rest).down
        # Presses do nothing meanwhile: a stop that is cut off half way would leave processes.
        with ignored():
            print("Pool stopped." if session.stop(down=down) else "No pool was running.")
        ignore_for_a_moment()  # a press that comes as it ends would say that it was interrupted

    def _restart(self, rest: str) -> None:
        ranks = arguments.COMMANDS["restart"]().parse_line(rest).ranks
        pool = session.current_pool()
        with tables.StartProgress("Starting ranks again", _NOT_RESTARTED) as progress:
            pool.restart(ranks, progress=progress)
            progress.finish(pool)

    def _sync(self, rest: str) -> None:
        chosen = arguments.COMMANDS["sync"]().parse_line(rest)
        if not chosen.variables:
            raise OptionsError(
                "%gpupool sync: give the source rank and the variables to copy, as in "
                "`%gpupool sync 0 model optimizer`."
            )
        ranks = session.current_pool().sync_from(chosen.rank, *chosen.variables, ranks=chosen.ranks)
        names, listed = ", ".join(chosen.variables), ", ".join(map(str, ranks))
        if not ranks:
            print("There is no other rank.")
        else:
            has = "has" if len(ranks) == 1 else "have"
            print(f"Rank {listed} now {has} {names} of rank {chosen.rank}.")

    def _interrupt(self, rest: str) -> None:
        arguments.COMMANDS["interrupt"]().parse_line(rest)
        is_any = session.current_pool().interrupt()
        print("Interrupted the busy ranks." if is_any else "No rank is busy.")

    def _hosts(self, rest: str) -> None:
        arguments.COMMANDS["hosts"]().parse_line(rest)
        hosts = session.current_pool().hosts()
        if hosts:
            display(host_table.hosts_shown(hosts), raw=True)
        else:
            print("All ranks of the pool are on this machine.")

    def _gpus(self, rest: str) -> object:
        arguments.COMMANDS["gpus"]().parse_line(rest)
        return gpus()

    def _env(self, rest: str) -> None:
        chosen = arguments.env_parser().parse_line(rest)
        pool = session.current_pool()
        if chosen.aws and chosen.unset:
            raise OptionsError("%gpupool env: --aws and --unset exclude each other.")
        if chosen.names or chosen.aws:
            changed = pool.propagate_env(*chosen.names, aws=chosen.aws, unset=chosen.unset)
            credentials = pool.status().credentials if chosen.aws else ""
            print(tables.env_text(changed, pool.world_size, chosen.unset, credentials))
        elif chosen.unset:
            raise OptionsError("%gpupool env --unset: name the variables to remove.")
        else:
            status = pool.status()
            credentials = status.credentials
            print(tables.env_text(status.env, pool.world_size, credentials=credentials))

    def _log(self, rest: str) -> None:
        chosen = arguments.log_parser().parse_line(rest)
        text = session.current_pool().log(chosen.rank, chosen.num_lines)
        print(
            text or f"The log of rank {chosen.rank} is empty: nothing was printed outside of cells."
        )

    def _debug(self, rest: str) -> None:
        rank = arguments.COMMANDS["debug"]().parse_line(rest).rank
        debug.post_mortem(session.current_pool(), rank)

    def _help(self, rest: str) -> None:
        command = arguments.COMMANDS["help"]().parse_line(rest).command
        if command == "spmd":
            print(self._cell_help)
        else:
            print(arguments.COMMANDS[command]().manual() if command else arguments.overview())
