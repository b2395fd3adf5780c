"""What `capture` says about a cell is true of it when it runs."""

from __future__ import annotations

import ast
import dis
import random
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.core.wire.global_names import names_in_code
from gpupool.spmd.capture.capture import CellNames, names_in_cell
from tests.spmd.capture.programs import Before, Namespace, TooMuch, Writer, compiled


def check_cell(source: str, seed: int) -> None:
    """Run a cell a few times and compare with its names."""
    names = names_in_cell(source, str)
    code = compiled(source)
    if code is None:
        assert names == CellNames(), source
        return
    for number in range(3):
        namespace = Namespace(seed + number)
        with suppress(TooMuch, Exception):
            exec(code, namespace)
        assert namespace.seen <= names.reads, source
        assert namespace.changed() <= names.assigns | names.imports, source


def check_function(source: str, seed: int) -> None:
    """Call a function a few times and compare with the names of its code."""
    module = compiled(source)
    if module is None:
        return
    codes = [c for c in module.co_consts if isinstance(c, types.CodeType) and c.co_name == "f"]
    reads, assigns = names_in_code(codes[0])
    for number in range(3):
        namespace = Namespace(seed + number)
        with suppress(TooMuch, Exception):
            value = types.FunctionType(codes[0], namespace)(Before())
            list(value) if isinstance(value, types.GeneratorType) else value
        assert namespace.seen <= reads, source
        assert namespace.changed() <= assigns, source


@st.composite
def sources(draw: st.DrawFn, write: Callable[[Writer], str]) -> str:
    """What is written with choices that Hypothesis makes, so that it finds the shortest."""
    return write(Writer(lambda words: draw(st.sampled_from(words))))


@settings(max_examples=50)
@given(sources(Writer.program), st.integers(0, 1000))
def test_what_a_cell_sees_and_changes_is_among_its_names(source: str, seed: int) -> None:
    check_cell(source, seed)


@settings(max_examples=50)
@given(sources(Writer.function), st.integers(0, 1000))
def test_what_a_function_sees_and_changes_is_among_its_names(source: str, seed: int) -> None:
    check_function(source, seed)


@pytest.mark.long
def test_many_more_programs() -> None:
    # by plain chance: a hundred times as fast
    chance = random.Random(4)
    writer = Writer(chance.choice)
    for seed in range(2000):
        check_cell(writer.program(), seed)
        check_function(writer.function(), seed)


MODULES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::5]
# what the compiler looks up and binds by itself
ADDED = {"__name__", "__module__", "__qualname__", "__doc__", "__annotations__"}
ADDED |= {"__class__", "__debug__"}


def operations(code: types.CodeType, *, nested: bool = False) -> Iterator[tuple[str, str]]:
    """What compiled code does with names that are not a function's own: (operation, name)."""
    found = [(step.opname, step.argval) for step in dis.Bytecode(code)]
    # only class bodies do this where nested
    own = {name for operation, name in found if nested and operation == "STORE_NAME"}
    for operation, name in found:
        if name in own and operation.endswith("_NAME"):
            yield "OWN", name
        elif operation.endswith(("_NAME", "_GLOBAL", "_GLOBALS")):
            yield operation.split("_")[0], name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from operations(constant, nested=True)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_names_of_real_modules_are_those_of_their_compiled_code(path: Path) -> None:
    source = path.read_text()
    found = set(operations(compile(source, path.name, "exec", dont_inherit=True)))
    stored, loaded, deleted, own = (
        {name for operation, name in found if operation == verb} - ADDED
        for verb in ("STORE", "LOAD", "DELETE", "OWN")
    )
    nodes = ast.walk(ast.parse(source))
    temporary = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    names = names_in_cell(source, str)
    assert stored - temporary <= (names.assigns | names.imports) - ADDED <= stored
    assert deleted - temporary <= names.deletes <= deleted
    assert loaded - stored <= names.reads - ADDED <= loaded | deleted | own
