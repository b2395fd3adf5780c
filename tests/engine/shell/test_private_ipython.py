"""What cells and their tracebacks rely on in IPython and ipykernel that these do not promise.

One test for each name or unwritten fact; if one fails after an upgrade, the file that it names has
to change.
"""

from __future__ import annotations

import inspect
import linecache
import re
from typing import Any

import pytest
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from IPython.core import ultratb
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture
def shell() -> InteractiveShell:
    return InteractiveShell()


def test_the_compiler_maps_file_names_to_cells(shell: InteractiveShell) -> None:
    """`_filename_map`, in engine/shell/cell_names.py and spmd/cell.py."""
    name = shell.compile.cache("x = 1\n", 7)
    assert shell.compile._filename_map == {name: 7}
    assert shell.compile.format_code_name(name) == ("Cell", "In[7]")
    assert shell.compile.format_code_name("other.py") is None


def test_a_compiler_of_ours_is_asked_for_cells_and_for_the_code_of_magics(
    shell: InteractiveShell,
) -> None:
    """`shell.compile` and what is called on it, in engine/shell/cell_names.py."""
    seen = []

    class Compiler(CachingCompiler):
        def cache(self, transformed_code: str, number: int = 0, raw_code: str = "") -> str:
            seen.append(("cached", raw_code))
            name: str = super().cache(transformed_code, number, raw_code)
            assert name.startswith("<ipython-input-7-")
            return name

        def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
            seen.append(("parsed", filename[:4]))
            return super().ast_parse(source, filename, symbol)

        def __call__(self, source: Any, filename: str, *args: Any, **options: Any) -> Any:
            seen.append(("compiled", filename))
            return super().__call__(source, filename, *args, **options)

    shell.compile, shell.execution_count = Compiler(), 7
    cell = "%%time\nx = 1\ny = 2"
    shell.run_cell(cell, store_history=False).raise_error()
    assert seen[:2] == [("cached", cell), ("parsed", "<ipy")]
    assert seen[-2:] == [("parsed", "<unk"), ("compiled", "<timed exec>")]


def test_a_file_without_lines_is_shown_as_the_traceback_has_it(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get_line_number_of_frame`, in engine/shell/cell_names.py."""
    name = "/tmp/ipykernel_7/no_such_file.py"
    text = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    error = e\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {}
    exec(compile(text + "frame = __import__('sys')._getframe()\n", name, "exec"), names)
    monkeypatch.setattr(ultratb, "get_line_number_of_frame", lambda frame: 1)
    error = names["error"]
    lines = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__, 0)
    assert "----> 2     1 / 0" in re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))


def test_the_kernel_tells_what_it_was_asked() -> None:
    """`kernel.get_parent`, in engine/output/status.py."""
    assert list(inspect.signature(Kernel.get_parent).parameters) == ["self", "channel"]
    assert issubclass(IPythonKernel, Kernel)
