"""%gpupool, %%spmd and %spmd: parse, call, display. Runs on the client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.display import display

from gpupool.core.errors import OptionsError
from gpupool.core.options import suggest
from gpupool.core.topology import gpus
from gpupool.notebook import arguments, pool_view, spmd_view
from gpupool.pool import session
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import SpmdRun

_NAMES = ("gpupool", "spmd")


@magics_class
class GpupoolMagics(Magics):
    """The magics; every one is a few lines over the Python API."""

    shell: Any

    @line_magic
    def gpupool(self, line: str) -> object:
        """%gpupool [status] | start | stop | interrupt | gpus | env | log"""
        word, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], object]] = {
            "": self._status,
            "status": self._status,
            "start": self._start,
            "stop": self._stop,
            "interrupt": self._interrupt,
            "gpus": self._gpus,
            "env": self._env,
            "log": self._log,
        }
        if word not in commands:
            known = [name for name in commands if name]
            raise OptionsError(f"%gpupool has no command {word!r}. {suggest(word, known)}")
        return commands[word](rest)

    @line_cell_magic
    def spmd(self, line: str, cell: str | None = None) -> SpmdResult | SpmdRun | None:
        """%%spmd [-t RANKS] [-o NAME] [--view V] [--timeout S] [--nowait]: run it on the ranks.

        In the cell rank, world_size, local_rank, device, torch and dist are defined.
        %spmd EXPRESSION gives the expression's value per rank.
        """
        if cell is None:
            return self._expression(line)
        chosen = arguments.spmd_parser().parse_line(line)
        pool = session.current_pool(create=True)
        run = SpmdRun(
            pool,
            cell,
            pool.select_ranks(chosen.ranks),
            spmd_view.make_view(chosen.view),
            timeout_s=chosen.timeout_s,
            cell_number=self.shell.execution_count,
            on_result=lambda result: self._bind(chosen.name, result),
        )
        if chosen.nowait:
            self._bind(chosen.name, run)
            return run
        run.result()
        return None

    # ---- the commands of %gpupool --------------------------------------------------------

    def _status(self, rest: str) -> None:
        arguments.bare_parser("status").parse_line(rest)
        pool = session.find()
        if pool is None:
            print("No pool runs in this notebook. `%gpupool start` starts one.")
        else:
            display(pool.status())

    def _start(self, rest: str) -> None:
        options = vars(arguments.start_parser().parse_line(rest))
        with pool_view.StartProgress() as progress:
            pool = session.start(**options, progress=progress)
            progress.finish(pool.status())

    def _stop(self, rest: str) -> None:
        arguments.bare_parser("stop").parse_line(rest)
        print("Pool stopped." if session.stop() else "No pool was running.")

    def _interrupt(self, rest: str) -> None:
        arguments.bare_parser("interrupt").parse_line(rest)
        session.current_pool().interrupt()

    def _gpus(self, rest: str) -> object:
        if not arguments.gpus_parser().parse_line(rest).watch:
            return gpus()
        handle = display(gpus(), display_id=True)
        try:
            while True:
                time.sleep(1.0)
                handle.update(gpus())
        except KeyboardInterrupt:  # the stop button ends the watching, and is no error here
            return None

    def _env(self, rest: str) -> None:
        chosen = arguments.env_parser().parse_line(rest)
        pool = session.current_pool()
        if chosen.names:
            changed = pool.propagate_env(*chosen.names, unset=chosen.unset)
            print(pool_view.env_text(changed, pool.world_size, chosen.unset))
        elif chosen.unset:
            raise OptionsError("%gpupool env --unset: name the variables to remove.")
        else:
            print(pool_view.env_text(pool.status().env, pool.world_size))

    def _log(self, rest: str) -> None:
        chosen = arguments.log_parser().parse_line(rest)
        print(session.current_pool().log(chosen.rank, chosen.num_lines))

    # ---- inside --------------------------------------------------------------------------

    def _expression(self, line: str) -> SpmdResult:
        if not line.strip():
            raise OptionsError("%spmd needs an expression, as in `%spmd rank * 2`.")
        return session.current_pool(create=True).run(line)

    def _bind(self, name: str | None, value: object) -> None:
        if name is not None:
            if not name.isidentifier():
                raise OptionsError(f"-o {name}: not a name that a variable can have.")
            self.shell.user_ns[name] = value


def register(shell: Any) -> None:
    """Give `shell` the magics, and IPython the pictures of our objects."""
    shell.register_magics(GpupoolMagics)
    pool_view.register_formatters(shell)
    spmd_view.register_formatters(shell)


def unregister(shell: Any) -> None:
    """Take the magics away again."""
    for name in _NAMES:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)
