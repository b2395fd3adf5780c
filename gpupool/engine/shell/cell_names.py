"""Whose code a file holds, and the cell and line that tracebacks name for it. Runs on engines.

IPython knows which cell a file name of compiled code stands for, in the process that compiled it.
Two things are added. Code of the notebook that travelled here is known as well (`remember`). Lines
count from the top of the notebook's cell: `%%spmd`'s own line, which the source has as an empty
one, is counted, and so are those of magics above, as of `%%time`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from IPython.core import ultratb
from IPython.core.compilerop import CachingCompiler

from gpupool.engine.shell.shell import this_shell

_RUN = "<ipython-input-0-"  # what `pool.run` was given: a cell without a number
_OF_MAGICS = ("<timed ", "<magic-timeit")  # what `%time` and `%timeit` compile


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
        """Parse what is noted, or the code of a magic, which has no name."""
        if filename == "<unknown>":
            self._body = ""
            if self._num_above(source):
                self._body = filename = self.cache(source, this_shell().execution_count)
        above = max(len(linecache.getlines(filename)) - len(source.splitlines()), 0)
        return super().ast_parse("\n" * above + source, filename, symbol)

    def __call__(self, source: Any, filename: str, *args: Any, **options: Any) -> Any:
        """Compile; the code of a magic under the cell's name."""
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


def show_source_of_cells() -> None:
    """Have IPython show the notebook's cells, whose files do not exist, as it shows files.

    Else it would show the line where their frame is now: in an `except` clause perhaps.
    """
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
