"""Whose code a file holds, and the cell and line that tracebacks name for it. Runs on engines.

IPython knows which cell a file name of compiled code stands for, in the process that compiled it.
Three things are added. Code of the notebook that travelled here is known as well (`remember`).
Lines count from the top of the notebook's cell: `%%spmd`'s own line, which the source has as an
empty one, is counted, and so is the line of a magic inside, as in `%%time`. Warnings say the cell
instead of the file.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib.util
import linecache
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from gpupool.core.wire.global_names import names_in_code
from gpupool.engine.shell.shell import this_shell

_MAGICS = {"run_cell_magic": 1, "run_line_magic": 0}  # -> lines from the magic to its code
_HERE = f"{Path(__file__).parents[1]}/"
_NAMELESS = ("<unknown>", "<timed exec>", "<timed eval>", "<magic-timeit>")


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


def name_cells_in_warnings() -> None:
    """Have warnings name "Cell In[12], line 3"; the file name is another one on every rank."""

    def format_warning(
        message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        cell = cell_of(this_shell(), filename)
        if not cell:
            return plain(message, category, filename, lineno, line)
        text = linecache.getline(filename, lineno).strip() if line is None else line.strip()
        shown = f"{cell}, line {lineno}: {category.__name__}: {message}\n"
        return f"{shown}  {text}\n" if text else shown

    plain = warnings.formatwarning
    warnings.formatwarning = format_warning


@contextlib.contextmanager
def counting_lines(shell: Any, source: str, is_cell: bool = True) -> Iterator[_Compiler]:
    """While entered, code that `shell` compiles gets the lines that it has in the cell `source`.

    Source that is no cell of the notebook is called <pool.run>.
    """
    outer = shell.compile
    compiler = outer._compiler if isinstance(outer, _Compiler) else outer
    shell.compile = own = _Compiler(compiler, shell, source, is_cell)
    try:
        yield own
    finally:
        shell.compile = outer


class _Compiler:
    """The shell's compiler, which is asked for everything; it only moves lines."""

    def __init__(self, compiler: Any, shell: Any, source: str, is_cell: bool) -> None:
        self._compiler = compiler
        self._shell = shell
        self._source = source
        self._is_cell = is_cell
        self._name = ""  # of what a magic has had parsed last
        self._parsed: list[str] = []
        self._moved: dict[str, int] = {}  # cached cell -> lines above it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Note a cell, or what `%%capture` and its like run as one."""
        above = self._lines_above(raw_code or transformed_code)
        moved = "\n" * above + transformed_code
        name: str = self._compiler.cache(moved, number, raw_code="\n" * above + (raw_code or moved))
        if not self._is_cell:
            name = self._rename(name)
        self._moved[name] = above
        return name

    def _rename(self, name: str) -> str:
        """A name that stands for this text alone.

        It must not be IPython's number: that is the notebook's last cell, or an older one.
        """
        del self._compiler._filename_map[name]
        entry, number = linecache.cache.pop(name), 1
        new = "<pool.run>"
        while new in linecache.cache and linecache.cache[new][2] != entry[2]:  # type: ignore[misc]
            number += 1
            new = f"<pool.run {number}>"
        linecache.cache[new] = (*entry[:3], new)
        return new

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """Parse a cell that is noted, or the code of a magic, which has no name."""
        if filename in _NAMELESS:
            number = self._shell.execution_count
            filename = self._name = self.cache(source, number, _body_of_magic())
        moved = "\n" * self._moved.get(filename, 0) + source
        self._parsed.append(moved)
        return self._compiler.ast_parse(moved, filename, symbol)

    def names_bound(self) -> set[str]:
        """The global names that the code of the cell and of its magics binds by name."""
        bound = set[str]()
        for source in self._parsed:
            with contextlib.suppress(SyntaxError):
                code = compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
                bound |= names_in_code(code)[1]
                bound |= {s.argval for s in dis.get_instructions(code) if s.opname == "STORE_NAME"}
        return bound

    def __call__(self, source: Any, filename: str, symbol: str, *args: Any, **options: Any) -> Any:
        """Compile under the cell's name what a magic compiles under a name of its own."""
        if filename in _NAMELESS and self._name:
            filename = self._name
        return self._compiler(source, filename, symbol, *args, **options)

    def _lines_above(self, raw: str) -> int:
        calling = _calling_magic()
        if calling is None:  # the whole cell
            raw, above = self._source, 0
        else:
            frame, distance = calling
            raw = frame.f_locals.get("cell", raw) if distance else raw
            above = _caller(frame).f_lineno - 1 + distance
        return above + len(raw) - len(raw.lstrip("\n"))


def _calling_magic() -> tuple[FrameType, int] | None:
    """The innermost magic that runs in this thread, and how far below its line its code begins."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _MAGICS and code.co_filename.endswith("interactiveshell.py"):
            return frame, _MAGICS[code.co_name]
        if code.co_name == "run_cell" and code.co_filename.endswith("execute.py"):
            return None  # magics outside called us
        frame = frame.f_back
    return None


def _caller(frame: FrameType) -> FrameType:
    """The frame that has called a magic; what watches magics (`QuietErrors`) lies between."""
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name != "run_magic" or not frame.f_code.co_filename.startswith(_HERE):
            break
    return frame


def _body_of_magic() -> str | None:
    calling = _calling_magic()
    return calling[0].f_locals.get("cell") if calling else None


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return f"{Path(spec.origin).parent}/" if spec and spec.origin else "?"


_PACKAGES = ("gpupool", "IPython", "ipykernel", "ipyparallel", "cloudpickle")
MACHINERY = tuple(map(_folder, _PACKAGES))
TORCH = _folder("torch")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
_NOWHERE = ("<frozen ", "<string>", "<__array_function__")  # code without a file


def is_users(filename: str) -> bool:
    """Whether code of this file is the user's: not a library's, nor ours."""
    return not filename.startswith((*MACHINERY, *LIBRARIES, *_NOWHERE))


def place(filename: str) -> str:
    """A file's name; of what `pool.run` was given without its number, which ranks count apart."""
    return "pool.run" if filename.startswith("<pool.run") else Path(filename).name
