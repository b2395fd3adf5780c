"""%gpupool, %%spmd and %spmd: parse, call, display. Runs on the client."""

from __future__ import annotations

import argparse
import inspect
import threading
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from gpupool.core.errors import OptionsError
from gpupool.notebook import formatters
from gpupool.notebook.cells import views
from gpupool.notebook.magics import arguments, background, completion
from gpupool.notebook.magics.commands import Commands, Interrupted
from gpupool.notebook.pool import tables
from gpupool.pool import session
from gpupool.pool.calls.presses import ignore_for_a_moment
from gpupool.pool.notices import NoticeLines
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import Notebook, SpmdRun, in_its_place

_NAMES = ("gpupool", "spmd", "%spmd")


@magics_class
class GpupoolMagics(Magics):
    """The magics; every one is a few lines over the Python API."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._commands = Commands(shell, inspect.cleandoc(GpupoolMagics.spmd_cell.__doc__ or ""))

    @line_magic
    def gpupool(self, line: str) -> object:
        return self._commands.run(line)

    gpupool.__doc__ = arguments.overview()  # so `%gpupool help` and `%gpupool?` say the same

    @cell_magic("spmd")  # type: ignore[arg-type]
    def spmd_cell(self, line: str, cell: str) -> SpmdRun | None:
        """Run the cell on every rank; the process group of torch.distributed is ready.

        %%spmd [-t RANKS] [-o NAME] [--view auto|quiet] [--timeout SECONDS] [--nowait]
               [--isolate] [--no-sync]

            -t, --targets RANKS  where: all (the default), 0, 0,2, 0:4, ::2 or -1
            -o, --out NAME       bind the result: NAME[rank] is the value of the last expression,
                                 NAME.text(rank) what was printed
            --view auto          the end of the output while it runs, then equal ranks as one
                   quiet         nothing
            --timeout SECONDS    interrupt the ranks after that long
            --nowait             do not wait: the cell's value, or NAME, is a handle with
                                 .done(), .result(), .interrupt(), `await handle`
            --isolate            send no variable and bring none back
            --no-sync            end without waiting for what GPUs still compute; its errors then
                                 appear in a later cell

        rank, world_size, local_rank, device, torch and dist are defined in the cell.
        The cell can use the notebook's variables. They are sent again when they have changed.
        What the cell assigns becomes a Composite in the notebook, a handle of each rank's value:
        x[rank], x.gather(), x.previous.
        `%spmd EXPRESSION` gives the value of an expression on each rank.
        """
        __tracebackhide__ = True  # of an error that the user's code has chained to its own
        chosen = arguments.spmd_parser().parse_line(line)
        return self._cell(chosen, in_its_place(cell, self.shell))

    @no_var_expand
    @line_magic("%spmd")  # type: ignore[arg-type]
    def spmd_below_code(self, line: str) -> None:
        """What IPython looks for where `%%spmd` is not the first line of its cell."""
        raise OptionsError(
            "%%spmd must be the first line of its cell: put what stands above it into a cell of "
            "its own, or below it, where it runs on every rank."
        )

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
            raise Interrupted("interrupted before the cell began.") from None
        if chosen.nowait:
            self._bind(chosen.name, run)
            background.watch(run)
            return run
        if run.waits_for:
            print(f"gpupool: waiting for {', '.join(run.waits_for)} to end…")
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
            raise OptionsError("%spmd needs an expression, as in `%spmd rank * 2`.")
        source = in_its_place(line, self.shell)
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
        chosen = pool.select(ranks)
        # the n of In [n]; execution_count is one higher from some version of IPython on
        number = self.shell.displayhook.prompt_count
        # One for each cell: a press means the loop under which its button stands.
        stop_wish = threading.Event()
        view = views.make_view(
            view_name,
            chosen,
            show_values,
            is_value=is_value,
            result_name=result_name,
            stop_wish=stop_wish,
        )
        return SpmdRun(
            pool,
            source,
            chosen,
            view,
            timeout_s=timeout_s,
            notebook=notebook,
            cell_number=number,
            stop_wish=stop_wish,
            waits_for_gpu=waits_for_gpu,
            on_notice=NoticeLines(f"cell In[{number}] (--nowait)") if unwaited else None,
        )

    def _notebook(self, *, at_once: bool = False) -> Notebook:
        return Notebook(self.shell.user_ns, self.shell.transform_cell, at_once)

    def _bind(self, name: str | None, value: object) -> None:
        # IPython lets `_` alone for good if anyone else binds it, and does so itself in a moment
        if name not in (None, "_"):
            self.shell.user_ns[name] = value


def without_remarks(lines: list[str]) -> list[str]:
    """A cell without the comments above its `%%spmd`: for IPython it has to be the first line."""
    for number, line in enumerate(lines):
        if line.startswith("%%spmd"):
            return lines[number:]
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return lines


def register(shell: Any) -> None:
    """Give `shell` the magics, and IPython the pictures of our objects."""
    shell.register_magics(GpupoolMagics)
    shell.input_transformers_cleanup.append(without_remarks)
    formatters.register(shell)
    views.register_formatters(shell)
    completion.register(shell)
    background.register(shell)


def unregister(shell: Any) -> None:
    """Take the magics and their completion away again; pictures of our objects stay."""
    completion.unregister(shell)
    background.unregister(shell)
    # by its name: `%autoreload` makes the function again
    transformers, ours = shell.input_transformers_cleanup, without_remarks.__name__
    transformers[:] = [one for one in transformers if getattr(one, "__name__", "") != ours]
    for name in _NAMES:
        for kind in ("line", "cell"):
            # IPython has no public way to take a magic away.
            shell.magics_manager.magics[kind].pop(name, None)
