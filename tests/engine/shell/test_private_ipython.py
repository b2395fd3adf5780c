"""What the tracebacks and auto rely on in IPython and ipykernel that these do not promise.

One test for each name or unwritten fact; if one fails after an upgrade, the file that it names has
to change.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import traceback
from typing import Any

import pytest
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from IPython.core import tbtools, ultratb
from IPython.core.compilerop import CachingCompiler
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


def test_the_shells_compiler_can_be_another_one_for_a_while(shell: InteractiveShell) -> None:
    """`shell.compile` and what is called on it, in engine/shell/cell_names.py."""
    seen: list[str] = []

    class Through:
        def __init__(self, compiler: CachingCompiler) -> None:
            self.compiler = compiler

        def __getattr__(self, name: str) -> Any:
            seen.append(name)
            return getattr(self.compiler, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            seen.append("()")
            return self.compiler(*args, **options)

    own, shell.compile = shell.compile, Through(own := shell.compile)
    shell.run_cell("%%time\nx = 1\ny = 2", store_history=False).raise_error()
    shell.compile = own
    assert seen.count("cache") == 1
    assert seen.count("ast_parse") == 2  # the cell and the body of the magic
    assert list(inspect.signature(CachingCompiler.ast_parse).parameters) == [
        "self", "source", "filename", "symbol",
    ]  # fmt: skip


def test_magics_compile_their_code_under_these_names() -> None:
    """`_NAMELESS`, in engine/shell/cell_names.py."""
    code = inspect.getsource(ExecutionMagics)
    for name in ("<timed exec>", "<timed eval>", "<magic-timeit>"):
        assert name in code
    assert (
        inspect.signature(CachingCompiler.ast_parse).parameters["filename"].default == "<unknown>"
    )


def test_magics_are_called_by_methods_of_these_names(shell: InteractiveShell) -> None:
    """The stack that cell_names.py, tracebacks.py and notebook/magics/auto.py look at."""
    stacks: list[list[traceback.FrameSummary]] = []

    def look(line: str, cell: str | None = None) -> None:
        stacks.append(list(reversed(traceback.extract_stack())))
        frame = sys._getframe()
        while frame.f_code.co_name not in ("run_cell_magic", "run_line_magic"):
            assert frame.f_back is not None
            frame = frame.f_back
        if cell is not None:
            assert frame.f_locals["cell"] == cell
        assert frame.f_back is not None
        assert frame.f_back.f_lineno == 1

    shell.register_magic_function(look, "line_cell")
    shell.run_cell("%look").raise_error()
    shell.run_cell("%%look\n\nx = 1").raise_error()
    for stack in stacks:
        names = {(f.name, f.filename.rpartition("/")[2]) for f in stack}
        assert ("run_code", "interactiveshell.py") in names
        assert names & {
            ("run_line_magic", "interactiveshell.py"), ("run_cell_magic", "interactiveshell.py")
        }  # fmt: skip


def test_errors_of_scripts_and_of_nested_cells_are_shown_by_the_shells_own_code() -> None:
    """Who calls `showtraceback` and `showsyntaxerror`, in engine/cells/execute.py."""
    for method in (InteractiveShell.safe_execfile, InteractiveShell.safe_run_module):
        assert "self.showtraceback(" in inspect.getsource(method)
    assert "self.showtraceback(" in inspect.getsource(InteractiveShell.run_code)
    assert "self.showsyntaxerror(" in inspect.getsource(InteractiveShell.run_cell_async)
    line, cell = InteractiveShell.run_line_magic, InteractiveShell.run_cell_magic
    assert list(inspect.signature(line).parameters)[-1] == "_stack_depth"
    assert list(inspect.signature(cell).parameters) == ["self", "magic_name", "line", "cell"]
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


def test_frames_of_cells_are_records_whose_line_can_be_set(shell: InteractiveShell) -> None:
    """`get_records`, `_sd`, `lineno` and `frame`, in engine/cells/tracebacks.py."""
    assert list(inspect.signature(ultratb.VerboseTB.get_records).parameters) == [
        "self", "etb", "context", "tb_offset",
    ]  # fmt: skip
    assert "_sd" in inspect.getsource(tbtools.FrameInfo)
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    frames = caught.value.__traceback__
    (record,) = shell.InteractiveTB.get_records(frames, 5, 0)
    assert record.frame is sys._getframe()
    assert record.lineno == frames.tb_lineno  # type: ignore[union-attr]


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


def test_errors_without_a_number_are_parsed_from_their_tree() -> None:
    """A moved source parses to the moved lines, in engine/shell/cell_names.py."""
    tree = CachingCompiler().ast_parse("\n\nx = 1", "<unknown>", "exec")
    assert isinstance(tree, ast.Module)
    assert tree.body[0].lineno == 3
