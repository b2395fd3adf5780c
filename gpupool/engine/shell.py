"""The IPython shell that cells run in, and whose code a line belongs to. Runs on engines.

IPython knows which cell a file name of compiled code stands for, in the process that compiled it.
Two things are added. Code of the notebook that travelled here is known as well (`remember`). Lines
count from the top of the notebook's cell: `%%spmd`'s own line, which the source has as an empty
one, is counted, and so are those of magics above, as of `%%time`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import getpass
import importlib.util
import linecache
import pdb
import sys
import sysconfig
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from IPython.core import debugger, page, ultratb
from IPython.core.autocall import ZMQExitAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython

_RUN = "<ipython-input-0-"  # what `pool.run` was given: a cell without a number
_OF_MAGICS = ("<timed ", "<magic-timeit")  # what `%time` and `%timeit` compile

_NO_INPUT = (
    "a rank cannot ask for input. Ask in a cell of the notebook itself and use the answer in the "
    "next %%spmd cell; `%gpupool env NAME` sends a secret of the notebook's environment. "
    "`%gpupool debug RANK` opens the debugger where that rank failed last."
)


def this_shell() -> Any:
    return get_ipython()


def adapt_to_rank(shell: Any) -> None:
    """Have cells compiled, shown, left and interrupted as on a rank; nothing waits for input, or is
    kept for later."""
    shell.compile = CellCompiler()
    _show_source_of_cells()
    shell.exiter = _Exit(shell)  # type: ignore[no-untyped-call]
    shell.init_user_ns()
    # IPython's advice on SystemExit is not that for an engine.
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    _refuse_prompts(shell)
    shell.loop_runner = _run_in_loop
    # IPython keeps what cells print and display for a saved history. Nothing here reads that.
    shell._tee = lambda channel: contextlib.nullcontext()
    shell.events.register("post_run_cell", lambda _: shell.history_manager.outputs.clear())


class _Exit(ZMQExitAutocall):
    def __call__(self, code: object = None) -> None:
        __tracebackhide__ = True
        print("exit and quit end the cell. `%gpupool stop` ends the pool.", file=sys.stderr)
        raise SystemExit(code)


def _refuse_prompts(shell: Any) -> None:
    """Have all that would ask the user for a line, and wait or read an end of file, say at once
    that a rank cannot. What `x?` would open in a pager is printed."""

    def refuse(*_: object, **__: object) -> NoReturn:
        __tracebackhide__ = True  # the debugger opens in the caller's frame
        raise StdinNotImplementedError(_NO_INPUT)

    def print_page(text: Any, *_: object, **__: object) -> None:
        print(text["text/plain"] if isinstance(text, dict) else text)

    builtins.input = getpass.getpass = sys.breakpointhook = refuse
    pdb.set_trace = debugger.set_trace = refuse
    shell.debugger = lambda force=False: print(_NO_INPUT, file=sys.stderr)  # %debug, `%pdb on`
    shell.set_hook("show_in_pager", page.as_hook(print_page), 0)


def _run_in_loop(run: Coroutine[Any, Any, Any]) -> Any:
    """IPython's result of a cell that awaits; an interrupt is raised where the cell waits."""
    # The process's own event loop is running this call, and loops do not nest: it is hidden while
    # one for the cell runs. (In another thread the cell would not hear an interrupt.)
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            loop = runner.get_loop()
            task = loop.create_task(run)
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:  # met the loop, not the cell
                task.cancel()
                result = loop.run_until_complete(task)
                if isinstance(error := result.error_in_exec, asyncio.CancelledError):
                    result.error_in_exec = KeyboardInterrupt().with_traceback(error.__traceback__)
                return result
    finally:
        asyncio._set_running_loop(outer)


# ---- whose code a line belongs to --------------------------------------------------------------


class CellCompiler(CachingCompiler):
    """IPython's compiler. Code gets the lines that it has in the cell, also where empty lines are
    taken away above it, or a magic compiles what stands below its own line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cell = ""  # the one that runs, or ran last
        self._body = ""  # the file name of what a magic has had parsed last

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        return None if name.startswith(_RUN) else super().format_code_name(name)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Note a cell, or what `%%capture` and its like run as one."""
        raw = transformed_code if raw_code is None else raw_code
        name: str = super().cache("\n" * self._num_above(raw) + transformed_code, number, raw)
        return name

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        if filename == "<unknown>":
            self._body = ""
            if self._num_above(source):
                self._body = filename = self.cache(source, this_shell().execution_count)
        above = max(len(linecache.getlines(filename)) - len(source.splitlines()), 0)
        return super().ast_parse("\n" * above + source, filename, symbol)

    def __call__(self, source: Any, filename: str, *args: Any, **options: Any) -> Any:
        if self._body and filename.startswith(_OF_MAGICS):
            filename = self._body
        return super().__call__(source, filename, *args, **options)

    def _num_above(self, code: str) -> int:
        """How many lines of the cell, empty ones and magics, lie above this code; else 0."""
        lines = self.cell.rstrip().splitlines()
        above = lines[: max(len(lines) - len(code.strip().splitlines()), 0)]
        is_body = all(line.startswith("%%") or not line.strip() for line in above)
        return len(above) if is_body else 0


def remember(sources: Mapping[str, tuple[int, str]]) -> None:
    """Know code that was compiled in the notebook: file name -> (number of its cell, its text)."""
    shell = this_shell()
    for name, (number, text) in sources.items():
        lines = text.splitlines(keepends=True)
        linecache.cache[name] = (len(text), None, lines, name)  # no time: it is never checked
        shell.compile._filename_map[name] = number


def cell_of(filename: str) -> str:
    """ "Cell In[12]" for the file name of a cell's code; "" for other files."""
    shell = this_shell()  # none under torchrun
    label = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(label) if label else ""


def _show_source_of_cells() -> None:
    """Have IPython show a line of the notebook's cells, whose files do not exist, as one of a file:
    not the line where the frame is now, in an `except` clause perhaps."""
    module: Any = ultratb
    num_lines = module.get_line_number_of_frame
    module.get_line_number_of_frame = lambda frame: (
        1 if cell_of(frame.f_code.co_filename) else num_lines(frame)
    )


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return f"{Path(spec.origin).parent}/" if spec and spec.origin else "?"


TORCH = _folder("torch")  # which decorates by contextlib
_PACKAGES = ("gpupool", "IPython", "ipykernel", "ipyparallel", "cloudpickle", "torch")
MACHINERY = (*map(_folder, _PACKAGES), contextlib.__file__, *_OF_MAGICS, "<frozen runpy>")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
_NOWHERE = ("<frozen ", "<string>", "<__array_function__")  # code without a file


def innermost(lines: Sequence[tuple[str, int]]) -> str:
    """Of files and lines, from the outermost on, the last that is in a cell, else in a file of the
    user's: "Cell In[12], line 3" or "train.py, line 7"; else ""."""
    files = [
        f"{'pool.run' if name.startswith(_RUN) else Path(name).name}, line {line}"
        for name, line in lines
        if not name.startswith((*MACHINERY, *LIBRARIES, *_NOWHERE))  # a library's, or ours
    ]
    cells = [f"{cell}, line {line}" for name, line in lines if (cell := cell_of(name))]
    return [*files, *cells][-1] if files or cells else ""
