"""What the tracebacks and auto rely on in IPython and ipykernel that these do not promise.

One test for each name or unwritten fact; if one fails after an upgrade, the file that it names has
to change.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import re
from typing import Any

import pytest
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from IPython.core import ultratb
from IPython.core.compilerop import CachingCompiler, code_name
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magics.execution import ExecutionMagics
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.terminal.prompts import Prompts


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
    seen: list[tuple[str, ...]] = []

    class Compiler(CachingCompiler):
        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            name: str = code_name(transformed_code, number)
            assert re.fullmatch(r"<ipython-input-7-[0-9a-f]{12}>", name)
            seen.append(("cached", raw_code))
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
    code = inspect.getsource(ExecutionMagics)
    for name in ("<timed eval>", "<magic-timeit>"):
        assert name in code


def test_errors_of_files_and_of_nested_cells_are_shown_by_functions_of_these_names() -> None:
    """`_OF_FILES`, `_OF_CELLS` and `run_cell` in engine/cells/execute.py; the stack that
    engine/cells/tracebacks.py looks at."""
    shows = (InteractiveShell.safe_execfile, InteractiveShell.safe_run_module)
    for method in (*shows, InteractiveShell.run_code, InteractiveShell.run_ast_nodes):
        assert "self.showtraceback(" in inspect.getsource(method)
    assert "self.showsyntaxerror(" in inspect.getsource(InteractiveShell.run_cell_async)
    assert "self.shell.run_cell(cell)" in inspect.getsource(ExecutionMagics.capture)
    for method in (InteractiveShell.run_line_magic, InteractiveShell.run_cell_magic):
        assert "result = fn(*args, **kwargs)" in inspect.getsource(method)
    line_magic = inspect.signature(InteractiveShell.run_line_magic)
    assert list(line_magic.parameters)[1:] == ["magic_name", "line", "_stack_depth"]
    assert "ns['exit'] = self.exiter" in inspect.getsource(InteractiveShell.init_user_ns)


def test_a_cell_that_awaits_is_run_by_a_function_that_can_be_set(shell: InteractiveShell) -> None:
    """`loop_runner`, in engine/cells/execute.py."""
    ran: list[str] = []

    def run(coroutine: Any) -> Any:
        ran.append(coroutine.__name__)
        return asyncio.run(coroutine)

    usual, shell.loop_runner = shell.loop_runner, run
    for cell in ("x = 1", "import asyncio\nawait asyncio.sleep(0)"):
        shell.run_cell(cell).raise_error()
    shell.loop_runner = usual
    assert ran == ["run_cell_async"]


def test_a_file_without_lines_is_shown_as_the_traceback_has_it(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get_line_number_of_frame`, in engine/cells/tracebacks.py."""
    name = "/tmp/ipykernel_7/no_such_file.py"
    text = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    error = e\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {}
    exec(compile(text + "frame = __import__('sys')._getframe()\n", name, "exec"), names)
    monkeypatch.setattr(ultratb, "get_line_number_of_frame", lambda frame: 0)
    error = names["error"]
    lines = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__, 0)
    assert "----> 2     1 / 0" in re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))


def test_the_pager_can_be_replaced(shell: InteractiveShell) -> None:
    """`show_in_pager` and `as_hook`, in engine/shell/shell.py."""
    from IPython.core import page

    shown: list[str] = []
    shell.set_hook("show_in_pager", page.as_hook(lambda text, *_, **__: shown.append(text)), 0)
    shell.hooks.show_in_pager("told", start=0, screen_lines=0)
    assert shown == ["told"]


def test_a_transformer_with_side_effects_is_left_out_while_typing(shell: InteractiveShell) -> None:
    """`has_side_effects`, in notebook/magics/auto.py."""
    calls: list[list[str]] = []

    class Transformer:
        has_side_effects = True

        def __call__(self, lines: list[str]) -> list[str]:
            calls.append(lines)
            return lines

    shell.input_transformers_cleanup.append(Transformer())
    shell.check_complete("x = 1")
    assert calls == []
    shell.transform_cell("\n  x = 1")
    assert calls == [["x = 1\n"]]  # the last one sees what the others have cleaned


def test_the_prompt_is_an_object_with_these_methods() -> None:
    """`shell.prompts`, in notebook/magics/auto.py."""
    assert TerminalInteractiveShell.prompts.klass is Prompts
    for name in ("in_prompt_tokens", "continuation_prompt_tokens", "out_prompt_tokens"):
        assert callable(getattr(Prompts, name))


def test_the_kernel_tells_what_it_was_asked() -> None:
    """`kernel.get_parent`, in notebook/magics/auto.py."""
    assert list(inspect.signature(Kernel.get_parent).parameters) == ["self", "channel"]
    assert issubclass(IPythonKernel, Kernel)
