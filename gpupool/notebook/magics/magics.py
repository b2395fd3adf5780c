"""%gpupool, %%spmd and %spmd: parse, call, display. Runs on the client."""

from __future__ import annotations

import argparse
import sys
import threading
import tokenize
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from gpupool.core.errors import OptionsError
from gpupool.notebook import formatters, pool_bar
from gpupool.notebook.cells.picture import Look
from gpupool.notebook.cells.views import LineView, LiveView, QuietView, register_formatters
from gpupool.notebook.magics import arguments, commands
from gpupool.notebook.page.front_end import in_notebook
from gpupool.pool import session
from gpupool.pool.calls.output import SpmdResult
from gpupool.pool.calls.presses import ignore_for_a_moment
from gpupool.pool.notices import NoticeLines
from gpupool.spmd.cell import Notebook, SpmdRun, in_its_place


@magics_class
class GpupoolMagics(Magics):
    shell: Any

    @line_magic
    def gpupool(self, line: str) -> object:
        return commands.run(line)

    @cell_magic("spmd")  # type: ignore[arg-type]
    def spmd_cell(self, line: str, cell: str) -> SpmdRun | None:
        __tracebackhide__ = True  # of an error that the user's code has chained to its own
        chosen = arguments.SPMD.parse_line(line)
        # a terminal shows the value of every expression, that of `handle.result()` too
        is_value = chosen.nowait and getattr(self.shell, "kernel", None) is None
        try:
            run = self._begin(cell, chosen, is_value=is_value)
        except KeyboardInterrupt:
            ignore_for_a_moment()
            raise commands.Interrupted("interrupted before the cell began.") from None
        if chosen.nowait:
            self._bind(chosen.name, run)
            _tell_of_its_error(run, self.shell)
            return run
        if run.waits_for:
            print(f"gpupool: waiting for {', '.join(run.waits_for)} to end…")
        result = run.result()
        self._bind(chosen.name, result)
        # `_` and `Out` have it. As the cell's value it would be shown once more, and have IPython
        # flush both streams (1 to 2 ms).
        self.shell.displayhook.update_user_ns(result)
        return None

    # so `%gpupool help` and `%gpupool?` say the same
    gpupool.__doc__ = arguments.GPUPOOL.format_help()
    spmd_cell.__doc__ = arguments.SPMD.format_help()  # type: ignore[assignment]

    @no_var_expand
    @line_magic("%spmd")  # type: ignore[arg-type]
    def spmd_below_code(self, line: str) -> None:
        """What IPython looks for where `%%spmd` is not the first line of its cell."""
        raise OptionsError(
            "%%spmd must be the first line of its cell: put what stands above it into a cell of "
            "its own, or below it, where it runs on every rank."
        )

    @no_var_expand  # {} and $ belong to the expression
    @line_magic("spmd")  # type: ignore[arg-type]
    def spmd_line(self, line: str) -> SpmdResult:
        """The value of an expression on every rank: %spmd EXPRESSION

        `x = %spmd EXPRESSION` keeps it: x[rank]. `%%spmd` runs a whole cell.
        """
        __tracebackhide__ = True
        if not line.strip():
            raise OptionsError("%spmd needs an expression, as in `%spmd rank * 2`.")
        return self._begin(line, arguments.SPMD.parse_line(""), is_value=True).result()

    def _begin(self, code: str, chosen: argparse.Namespace, *, is_value: bool) -> SpmdRun:
        __tracebackhide__ = True
        pool = session.find() or pool_bar.start_unasked()
        if pool.status().state == "replacing":
            print("gpupool: waiting for the lost ranks to be replaced…")
        ranks = pool.select(chosen.ranks)
        # the n of In [n]; execution_count is one higher from some version of IPython on
        number = self.shell.displayhook.prompt_count
        # One for each cell: a press means the loop under which its button stands.
        stop_wish = threading.Event()
        shows_value = not (is_value or ends_quietly(code))
        look = Look(shows_value, name=chosen.name or "_")
        shown = LiveView(ranks, look, stop_wish) if in_notebook() else LineView(ranks, shows_value)
        view = QuietView() if chosen.view == "quiet" else shown
        # a handle's result shows its values itself, where it is asked for
        names, transform = self.shell.user_ns, self.shell.transform_cell
        notebook = None if chosen.isolate else Notebook(names, transform, at_once=chosen.nowait)
        return SpmdRun(
            pool,
            in_its_place(code, self.shell),
            ranks,
            view,
            timeout_s=chosen.timeout_s,
            notebook=notebook,
            cell_number=number,
            stop_wish=stop_wish,
            waits_for_gpu=not chosen.no_sync,
            on_notice=NoticeLines(f"cell In[{number}] (--nowait)") if chosen.nowait else None,
        )

    def _bind(self, name: str | None, value: object) -> None:
        # IPython lets `_` alone for good if anyone else binds it, and does so itself in a moment
        if name not in (None, "_"):
            self.shell.user_ns[name] = value


def ends_quietly(cell: str) -> bool:
    """Whether a cell ends in a semicolon: its value is not to be shown."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(cell))
    except (SyntaxError, tokenize.TokenError):  # a magic's line, or the ranks will say what it is
        return False


def _tell_of_its_error(run: SpmdRun, shell: Any) -> None:
    """Tell of an error of a `--nowait` cell below a later one, unless its result is asked for."""

    def tell(_: object) -> None:
        if run.done() and not run.asked and run.error is not None:
            print(f"{run.name} (--nowait) has failed: {run.error}", file=sys.stderr)
            print("Its .result() shows the output and the traceback.", file=sys.stderr)
        if run.done() or run.asked:
            shell.events.unregister("post_run_cell", tell)

    shell.events.register("post_run_cell", tell)


def register(shell: Any) -> None:
    shell.register_magics(GpupoolMagics)
    formatters.register(shell)
    register_formatters(shell)
