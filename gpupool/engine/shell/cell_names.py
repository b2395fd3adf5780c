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
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from IPython.core.compilerop import CachingCompiler, code_name

from gpupool.engine.shell.shell import this_shell

_RUN = "<pool.run"
_OF_MAGICS = ("<timed ", "<magic-timeit")  # what `%time` and `%timeit` compile
_MAGICS = re.compile(r"\s*(?:%%.*\n\s*)+")  # the lines above the code of a cell


class CellCompiler(CachingCompiler):
    """IPython's compiler. Code gets the lines that it has in the cell, also where empty lines are
    taken away above it, or a magic compiles what stands below its own line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cell = ""  # the one that runs
        self._is_notebooks = True
        self._above: dict[str, int] = {}  # file name -> lines above its code
        self._body = ""  # the file name of what a magic has had parsed last

    @contextlib.contextmanager
    def compiling(self, cell: str, is_notebooks: bool) -> Iterator[None]:
        """While entered, this cell runs. Source that is none of the notebook is <pool.run>."""
        self._cell, self._is_notebooks = cell, is_notebooks
        try:
            yield
        finally:
            self._cell, self._is_notebooks = "", True

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """A file name for this text alone, the same on all ranks."""
        name: str = code_name(transformed_code, number)
        return name if self._is_notebooks else f"{_RUN} {name[-13:]}"

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """What tracebacks say. `pool.run` has no number: that would be of the last cell."""
        return None if name.startswith(_RUN) else super().format_code_name(name)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Note a cell, or what `%%capture` and its like run as one."""
        raw = transformed_code if raw_code is None else raw_code
        above = self._num_above(raw)
        if raw == self._cell:
            above = raw[: len(raw) - len(raw.lstrip())].count("\n")
        name: str = super().cache("\n" * above + transformed_code, number, raw)
        self._above[name] = above
        return name

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """Parse what is noted, or the code of a magic, which has no name."""
        if filename == "<unknown>":
            self._body = ""
            if self._num_above(source):
                self._body = filename = self.cache(source, this_shell().execution_count)
        above = self._above.get(filename, 0)
        return super().ast_parse("\n" * above + source, filename, symbol)

    def __call__(self, source: Any, filename: str, *args: Any, **options: Any) -> Any:
        """Compile; the code of a magic under the cell's name."""
        if self._body and filename.startswith(_OF_MAGICS):
            filename = self._body
        return super().__call__(source, filename, *args, **options)

    def _num_above(self, code: str) -> int:
        """How many lines lie above what the cell's own magics run; 0 of other code."""
        magics = _MAGICS.match(self._cell)
        if magics is None or _num_lines(code) != _num_lines(self._cell[magics.end() :]):
            return 0
        return magics[0].count("\n")


def _num_lines(code: str) -> int:
    return len(code.strip().splitlines())


def remember(sources: Mapping[str, tuple[int, str]]) -> None:
    """Know code that was compiled in the notebook: file name -> (number of its cell, its text)."""
    shell = this_shell()
    for name, (number, text) in sources.items():
        lines = text.splitlines(keepends=True)
        linecache.cache[name] = (len(text), None, lines, name)  # no time: it is never checked
        shell.compile._filename_map[name] = number


def cell_of(shell: Any, filename: str) -> str:
    """ "Cell In[12]" for the file name of a cell's code; "" for other files."""
    label = shell.compile.format_code_name(filename)
    return " ".join(label) if label else ""


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return f"{Path(spec.origin).parent}/" if spec and spec.origin else "?"


_PACKAGES = ("gpupool", "IPython", "ipykernel", "ipyparallel", "cloudpickle")
MACHINERY = (*map(_folder, _PACKAGES), *_OF_MAGICS, "<frozen runpy>")  # the last is of `%run -m`
TORCH = _folder("torch")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
_NOWHERE = ("<frozen ", "<string>", "<__array_function__")  # code without a file


def is_users(filename: str) -> bool:
    """Whether code of this file is the user's: not a library's, nor ours."""
    return not filename.startswith((*MACHINERY, *LIBRARIES, *_NOWHERE))


def place(filename: str) -> str:
    """A file's name; what `pool.run` was given has none."""
    return "pool.run" if filename.startswith(_RUN) else Path(filename).name
