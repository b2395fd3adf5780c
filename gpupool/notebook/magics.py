"""%gpupool, %%spmd and %spmd: parse, call, display. Runs on the client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from gpupool.core.errors import OptionsError
from gpupool.core.options import suggest
from gpupool.notebook import arguments, completion, history, pool_view, spmd_view
from gpupool.pool import session
from gpupool.pool.gpus import gpus
from gpupool.pool.leftovers import Leftovers, leftovers
from gpupool.pool.pool import Pool
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import SpmdRun

_NAMES = ("gpupool", "spmd")


@magics_class
class GpupoolMagics(Magics):
    """The magics; every one is a few lines over the Python API."""

    shell: Any

    @line_magic
    def gpupool(self, line: str) -> object:
        """The pool of this notebook.

        %gpupool                 what runs: state, ranks, devices, process ids
        %gpupool start [PROFILE] [-n N] [--gpus 0,2] [--cpu] [--backend auto|nccl|gloo]
                       [--env NAME|GLOB ...] [--idle-timeout 30m|never] [--timeout SECONDS]
                       [--force] [--inline]
                                 start it: one rank per GPU, or 2 CPU ranks where there is none
            -n N                 number of ranks; those beyond the GPUs take no part in training
            --gpus 0,2           the GPUs to use: indices, UUIDs, or MIG instances such as 0:1
            --force              take GPUs that another pool has locked, too
            --cpu                leave the GPUs alone
            --backend NAME       nccl, gloo, or auto: nccl among ranks that have a GPU each
            --env NAME ...       environment variables for the ranks, as `%gpupool env` does
            --idle-timeout TIME  stop it after that long without use: 90s, 30m (the default), 2h
            --timeout SECONDS    give up starting after that many seconds
            --inline             no engines: this process is rank 0 of 1, for debugging; output
                                 goes straight here, breakpoint() and %debug work
        %gpupool stop            end every process of the pool
        %gpupool restart [RANKS] new engines for these ranks, or for all; the others keep
                                 their variables
        %gpupool interrupt       interrupt the ranks that are busy
        %gpupool gpus [--watch]  the GPUs of this machine and who uses them
        %gpupool leftovers [--reap]
                                 processes that earlier pools have left; --reap ends them
        %gpupool env [NAME|GLOB ...] [--aws] [--unset]
                                 copy environment variables to the ranks, as in
                                 `%gpupool env AWS_*`; without names: tell which are there.
                                 --aws sends what this notebook's AWS profile, SSO login or role
                                 gives, and again before it expires. Values are never shown.
        %gpupool log [RANK] [-n LINES]
                                 the end of an engine's log
        """
        word, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], object]] = {
            "status": self._status,
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "interrupt": self._interrupt,
            "gpus": self._gpus,
            "leftovers": self._leftovers,
            "env": self._env,
            "log": self._log,
        }
        word = word or "status"
        if word not in commands:
            raise OptionsError(f"%gpupool has no command {word!r}. {suggest(word, commands)}")
        if word in ("env", "start"):
            history.refuse_typed_value(self.shell, rest)
        return commands[word](rest)

    @cell_magic("spmd")  # type: ignore[arg-type]
    def spmd_cell(self, line: str, cell: str) -> SpmdRun | SpmdResult | None:
        """Run the cell on every rank; the process group of torch.distributed is ready.

        %%spmd [-t RANKS] [-o NAME] [--view auto|ranks|raw|quiet] [--timeout SECONDS] [--nowait]

            -t, --targets RANKS  where: all (the default), 0, 0,2, 0:4 or -1
            -o, --out NAME       bind the result: NAME[rank] is the value of the last expression,
                                 NAME.text(rank) what was printed
            --view auto          the end of the output while it runs, then equal ranks as one
                   ranks         the same with a block for each rank
                   raw           every line as it comes
                   quiet         nothing
            --timeout SECONDS    interrupt the ranks after that long
            --nowait             go on at once with a handle, NAME or the cell's own value:
                                 .done(), .result(), .interrupt(), `await handle`

        In the cell rank, world_size, local_rank, device, torch and dist are defined.
        `%spmd EXPRESSION` gives the value of an expression per rank.
        """
        chosen = arguments.spmd_parser().parse_line(line)
        run = self._begin(
            cell,
            chosen.view,
            not spmd_view.ends_quietly(cell),
            chosen.ranks,
            chosen.timeout_s,
            result_name=chosen.name or "_",
        )
        if chosen.nowait:
            self._bind(chosen.name, run)
            return run
        result = run.result()
        self._bind(chosen.name, result)
        return spmd_view.keep_quietly(result)

    @no_var_expand  # {} and $ belong to the expression
    @line_magic("spmd")  # type: ignore[arg-type]
    def spmd_line(self, line: str) -> SpmdResult:
        """The value of an expression on every rank: %spmd EXPRESSION

        `x = %spmd EXPRESSION` keeps it: x[rank]. `%%spmd` runs a whole cell.
        """
        if not line.strip():
            raise OptionsError("%spmd needs an expression, as in `%spmd rank * 2`.")
        return self._begin(line, "auto", is_value=True).result()

    # ---- the commands of %gpupool --------------------------------------------------------

    def _status(self, rest: str) -> None:
        arguments.COMMANDS["status"]().parse_line(rest)
        pool = session.find()
        if pool is None:
            print("No pool runs in this notebook. `%gpupool start` starts one.")
        else:
            display(pool.status())

    def _start(self, rest: str) -> None:
        options = vars(arguments.start_parser().parse_line(rest))
        found = leftovers()
        if found:
            print(f"{found!r}\n`%gpupool leftovers --reap` ends them.")
        with pool_view.StartProgress() as progress:
            pool = session.start(**options, progress=progress)
            progress.finish(pool)

    def _stop(self, rest: str) -> None:
        arguments.COMMANDS["stop"]().parse_line(rest)
        print("Pool stopped." if session.stop() else "No pool was running.")

    def _restart(self, rest: str) -> None:
        ranks = arguments.COMMANDS["restart"]().parse_line(rest).ranks
        pool = session.current_pool()
        with pool_view.StartProgress() as progress:
            pool.restart(ranks, progress=progress)
            progress.finish(pool)

    def _interrupt(self, rest: str) -> None:
        arguments.COMMANDS["interrupt"]().parse_line(rest)
        pool = session.current_pool()
        busy = pool.status().state == "busy"
        pool.interrupt()
        print("The busy ranks are interrupted." if busy else "No rank is busy.")

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

    def _leftovers(self, rest: str) -> Leftovers | None:
        chosen = arguments.COMMANDS["leftovers"]().parse_line(rest)
        found = leftovers()
        if not chosen.reap:
            return found
        found.reap()
        print(f"{len(found)} ended." if found else repr(found))
        return None

    def _env(self, rest: str) -> None:
        chosen = arguments.env_parser().parse_line(rest)
        pool = session.current_pool()
        if chosen.aws and chosen.unset:
            raise OptionsError("%gpupool env: --aws and --unset exclude each other.")
        if chosen.names or chosen.aws:
            changed = pool.propagate_env(*chosen.names, aws=chosen.aws, unset=chosen.unset)
            credentials = pool.status().credentials if chosen.aws else ""
            print(pool_view.env_text(changed, pool.world_size, chosen.unset, credentials))
        elif chosen.unset:
            raise OptionsError("%gpupool env --unset: name the variables to remove.")
        else:
            status = pool.status()
            credentials = status.credentials
            print(pool_view.env_text(status.env, pool.world_size, credentials=credentials))

    def _log(self, rest: str) -> None:
        chosen = arguments.log_parser().parse_line(rest)
        print(session.current_pool().log(chosen.rank, chosen.num_lines))

    # ---- inside --------------------------------------------------------------------------

    def _begin(
        self,
        source: str,
        view_name: str,
        show_values: bool = True,
        ranks: str = "all",
        timeout_s: float | None = None,
        result_name: str = "_",
        is_value: bool = False,
    ) -> SpmdRun:
        pool = session.find() or self._autostart()
        chosen = pool.select_ranks(ranks)
        view = spmd_view.make_view(
            view_name,
            chosen,
            pool.send_comm,
            show_values,
            inline=pool.options.inline,
            is_value=is_value,
            result_name=result_name,
        )
        return SpmdRun(
            pool,
            source,
            chosen,
            view,
            timeout_s=timeout_s,
            # the n of In [n]; execution_count is one higher from some version of IPython on
            cell_number=self.shell.displayhook.prompt_count,
        )

    def _autostart(self) -> Pool:
        with pool_view.StartProgress() as progress:
            sentence = session.started_unasked()
            pool = session.start(progress=progress)
            progress.finish_line(sentence.format(session.describe(pool)))
        return pool

    def _bind(self, name: str | None, value: object) -> None:
        if name is not None:
            self.shell.user_ns[name] = value


def register(shell: Any) -> None:
    """Give `shell` the magics, and IPython the pictures of our objects."""
    shell.register_magics(GpupoolMagics)
    pool_view.register_formatters(shell)
    spmd_view.register_formatters(shell)
    completion.register(shell)


def unregister(shell: Any) -> None:
    """Take the magics and their completion away again; pictures of our objects stay."""
    completion.unregister(shell)
    for name in _NAMES:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)
