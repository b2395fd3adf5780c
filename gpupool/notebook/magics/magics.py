"""%gpupool, %%spmd and %spmd: parse, call, display. Runs on the client."""

from __future__ import annotations

import argparse
import inspect
import threading
from collections.abc import Iterable
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from gpupool.core.errors import OptionsError
from gpupool.notebook import formatters
from gpupool.notebook.cells import views
from gpupool.notebook.magics import arguments, auto, background, completion
from gpupool.notebook.magics.commands import Commands, Interrupted
from gpupool.notebook.pool import tables
from gpupool.pool import session
from gpupool.pool.calls.presses import ignore_for_a_moment
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import Notebook, SpmdRun, in_its_place, on_its_line

_NAMES = ("gpupool", "spmd", "local")


@magics_class
class GpupoolMagics(Magics):
    """The magics; every one is a few lines over the Python API."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        # The docstring is the help, so `%gpupool help` and `%gpupool?` say the same.
        self._commands = Commands(shell, inspect.cleandoc(GpupoolMagics.gpupool.__doc__ or ""))
        self._reported: set[str] = set()  # names that were reported to the user

    @line_magic
    def gpupool(self, line: str) -> object:
        """The pool of this notebook.

        %gpupool [status]        what runs: state, ranks, devices, process ids; in a notebook with
                                 buttons to interrupt the ranks and to shut the pool down
        %gpupool start [PROFILE] [-n N] [--gpus 0,2] [--cpu] [--backend auto|nccl|gloo]
                       [--env NAME|GLOB ...] [--idle-timeout 30m|never] [--timeout SECONDS]
                       [--on-hang tell|abort] [--hang-after 30s|never] [--force] [--inline]
                                 start it: one rank per GPU, or 2 CPU ranks where there is none
            -n N                 number of ranks; those beyond the GPUs take no part in training
            --gpus 0,2           the GPUs to use: indices, UUIDs, or MIG instances such as 0:1
            --force              take GPUs that another pool or user has, too
            --cpu                leave the GPUs alone
            --backend NAME       nccl, gloo, or auto: nccl among ranks that have a GPU each
            --env NAME ...       environment variables for the ranks, as `%gpupool env` does
            --idle-timeout TIME  stop it after that long without use: 90s, 30m (the default), 2h
            --timeout SECONDS    give up starting after that many seconds
            --on-hang tell       when the ranks wait for each other and none gets on: say below the
                                 running cell where each one is
                      abort      end the cell as well; the ranks keep their variables
            --hang-after TIME    how long that may last: 30s (the default), 5m, never
            --inline             no engines: this process is rank 0 of 1, for debugging; output
                                 goes straight here, breakpoint() and %debug work
        %gpupool stop            end every process of the pool
        %gpupool restart [RANKS] new engines for these ranks, or for all; the others keep
                                 their variables
        %gpupool sync RANK NAME ... [-t RANKS] [--force]
                                 copy variables of a rank to the others, such as
                                 `%gpupool sync 0 model optimizer` after a restart of rank 1;
                                 -t (--targets): to these ranks only; --force: also tensors that
                                 an aborted collective on GPUs may have spoilt
        %gpupool interrupt       interrupt the ranks that are busy; a training is asked to stop, and
                                 keeps its network
        %gpupool auto on [-t RANKS] [--view NAME] [--timeout SECONDS] | off
                                 run every following cell on the ranks, as if it began with %%spmd.
                                 A cell stays in the notebook if %%local is its first line, if it
                                 has a line with %gpupool or %spmd, or is about the notebook
                                 (%load_ext, %history, ...). Without a word: say which it is.
                                 -t (--targets), --view and --timeout are those of %%spmd.
        %gpupool gpus [--watch [SECONDS]]
                                 the GPUs of this machine and who uses them; --watch: live, each
                                 second or so often, until the stop button is pressed
        %gpupool env [NAME|GLOB ...] [--aws] [--unset]
                                 copy environment variables to the ranks, as in
                                 `%gpupool env AWS_*`; without names: list those that are there.
                                 --aws sends what this notebook's AWS profile, SSO login or role
                                 gives, and again before it expires. Values are never shown.
        %gpupool log [RANK] [-n LINES]
                                 the end of an engine's log
        %gpupool debug [RANK]    the debugger on a rank's last error, or on that of the rank that
                                 failed first: p x, up, down, w, l, !x = 1; q ends it
        %gpupool check [--gpu] [--cpu] [--gpus 0,2] [--only NAME ...] [--seconds SECONDS] [--json]
                                 does gpupool keep its promises on this machine? A line for each, in
                                 two to four minutes, while no pool runs here and nobody else uses
                                 these GPUs
            --gpu, --cpu         on GPUs, or on two CPU ranks; else on GPUs if there are any
            --gpus 0,2           on these GPUs
            --only NAME ...      the checks whose names begin so: abort, kill, bits
            --seconds SECONDS    begin none later than that: 240
            --json               the report for programs, too
        %gpupool help            this text
        """
        return self._commands.run(line)

    @cell_magic("spmd")  # type: ignore[arg-type]
    def spmd_cell(self, line: str, cell: str) -> SpmdRun | None:
        """Run the cell on every rank; the process group of torch.distributed is ready.

        %%spmd [-t RANKS] [-o NAME] [--view auto|ranks|raw|quiet] [--timeout SECONDS] [--nowait]
               [--isolate] [--no-sync]

            -t, --targets RANKS  where: all (the default), 0, 0,2, 0:4, ::2 or -1
            -o, --out NAME       bind the result: NAME[rank] is the value of the last expression,
                                 NAME.text(rank) what was printed
            --view auto          the end of the output while it runs, then equal ranks as one
                   ranks         the same with a block for each rank
                   raw           every line as it comes
                   quiet         nothing
            --timeout SECONDS    interrupt the ranks after that long
            --nowait             go on at once with a handle, NAME or the cell's own value:
                                 .done(), .result(), .interrupt(), `await handle`
            --isolate            no variable travels, in either direction
            --no-sync            end without waiting for what GPUs still compute; its errors come
                                 in a later cell then

        A name that the cell reads and the notebook has is sent to the ranks, if it has changed. A
        name that the cell assigns is afterwards a Composite in the notebook, a handle of each
        rank's value: x[rank], x.gather(), x.previous. In the cell rank, world_size, local_rank,
        device, torch and dist are defined.
        `%spmd EXPRESSION` gives the value of an expression per rank.
        """
        __tracebackhide__ = True  # of an error that the user's code has chained to its own
        chosen = arguments.spmd_parser().parse_line(line)
        mode = auto.of(self.shell)
        if chosen.auto:
            mode.require_pool()
            if chosen.view != "quiet":
                mode.show_sign()
        return self._cell(chosen, in_its_place(cell, self.shell))

    @cell_magic("local")  # type: ignore[arg-type]
    def local_cell(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, also while `%gpupool auto` is on."""
        self.shell.run_cell(cell).raise_error()  # a cell that is sent comes not here: see auto.py

    def _cell(self, chosen: argparse.Namespace, cell: str) -> SpmdRun | None:
        __tracebackhide__ = True
        # a handle's result shows its values itself, where it is asked for
        notebook = None if chosen.isolate else self._notebook(at_once=chosen.nowait)
        try:
            run = self._begin(
                cell,
                chosen.view,
                not views.ends_quietly(cell),
                chosen.ranks,
                chosen.timeout_s,
                notebook,
                result_name=chosen.name or "_",
                # a terminal shows the value of every expression, that of `handle.result()` too
                is_value=chosen.nowait and getattr(self.shell, "kernel", None) is None,
                unwaited=chosen.nowait,
                waits_for_gpu=not chosen.no_sync,
            )
        except KeyboardInterrupt:
            ignore_for_a_moment()
            raise Interrupted("the cell was interrupted when it was about to begin.") from None
        if chosen.nowait:
            self._bind(chosen.name, run)
            background.watch(run, self.shell)
            return run
        if run.waits_for:
            print(f"gpupool: waits until {', '.join(dict.fromkeys(run.waits_for))} has ended.")
        result = run.result()
        self._bind(chosen.name, result)
        views.keep_quietly(result)
        return None

    @no_var_expand  # {} and $ belong to the expression
    @line_magic("spmd")  # type: ignore[arg-type]
    def spmd_line(self, line: str) -> SpmdResult:
        """The value of an expression on every rank: %spmd EXPRESSION

        `x = %spmd EXPRESSION` keeps it: x[rank]. `%%spmd` runs a whole cell.
        """
        __tracebackhide__ = True
        if not line.strip():
            raise OptionsError("%spmd needs an expression, as in `%spmd rank * 2`.", "incomplete")
        source = on_its_line(line, self.shell)
        return self._begin(source, "auto", notebook=self._notebook(), is_value=True).result()

    # ---- inside --------------------------------------------------------------------------

    def _begin(
        self,
        source: str,
        view_name: str,
        show_values: bool = True,
        ranks: str = "all",
        timeout_s: float | None = None,
        notebook: Notebook | None = None,
        result_name: str = "_",
        is_value: bool = False,
        unwaited: bool = False,
        waits_for_gpu: bool = True,
    ) -> SpmdRun:
        pool = session.find() or tables.start_unasked()
        status = pool.status()
        if status.state == "replacing":
            print(tables.waits_text(status))
        chosen = pool.select_ranks(ranks)
        # the n of In [n]; execution_count is one higher from some version of IPython on
        number = self.shell.displayhook.prompt_count
        # One for each cell: a press means the loop under which its button stands.
        stop_wish = threading.Event()
        view = views.make_view(
            view_name,
            chosen,
            show_values,
            inline=pool.options.inline,
            is_value=is_value,
            result_name=result_name,
            unwaited=f"cell In[{number}] (--nowait)" if unwaited else "",
            stop_wish=stop_wish,
        )
        run = SpmdRun(
            pool,
            source,
            chosen,
            view,
            timeout_s=timeout_s,
            notebook=notebook,
            cell_number=number,
            stop_wish=stop_wish,
            waits_for_gpu=waits_for_gpu,
        )
        self._tell_covered(run.covered)
        return run

    def _notebook(self, *, at_once: bool = False) -> Notebook:
        return Notebook(self.shell.user_ns, self.shell.transform_cell, at_once)

    def _tell_covered(self, names: Iterable[str]) -> None:
        """Say once of a name that it means something else in a cell than in the notebook."""
        new = sorted(set(names) - self._reported)
        if new:
            self._reported.update(new)
            is_or_are = "is" if len(new) == 1 else "are"
            print(
                f"gpupool: in a cell {', '.join(new)} {is_or_are} the rank's own, not what the "
                "notebook has under that name."
            )

    def _bind(self, name: str | None, value: object) -> None:
        # IPython lets `_` alone for good if anyone else binds it, and does so itself in a moment
        if name not in (None, "_"):
            self.shell.user_ns[name] = value


def register(shell: Any) -> None:
    """Give `shell` the magics, and IPython the pictures of our objects."""
    shell.register_magics(GpupoolMagics)
    formatters.register(shell)
    views.register_formatters(shell)
    completion.register(shell)
    auto.register(shell)
    background.register(shell)


def unregister(shell: Any) -> None:
    """Take the magics and their completion away again; pictures of our objects stay."""
    completion.unregister(shell)
    auto.unregister(shell)
    background.unregister(shell)
    for name in _NAMES:
        for kind in ("line", "cell"):
            # IPython has no public way to take a magic away.
            shell.magics_manager.magics[kind].pop(name, None)
