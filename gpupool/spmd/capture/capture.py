"""Which names of the notebook a cell reads and binds, found by compiling it. Runs on the client.

Invisible are names that only exist as text when the cell runs: `globals()["x"]`, `eval("x")`,
`get_ipython().user_ns["x"]`, and what `from m import *` binds. What `%run` binds the rank reports.
"""

from __future__ import annotations

import ast
import dis
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpupool.core.wire.global_names import with_nested
from gpupool.spmd.capture.flow import Flow


@dataclass(frozen=True, slots=True)
class CellNames:
    """The global names of a cell, `get_ipython` aside. A name can be in several of the sets."""

    reads: frozenset[str] = frozenset()
    """The cell may see what the notebook has bound to these. Builtins count too."""
    assigns: frozenset[str] = frozenset()
    """Bound by the cell other than by `import`, on some way through it or in a function of it."""
    imports: frozenset[str] = frozenset()
    """Bound by `import`."""
    deletes: frozenset[str] = frozenset()
    """Unbound by `del`, in a function too."""
    attributes: frozenset[str] = field(default=frozenset(), compare=False)
    """What stands behind a dot, which may be a submodule."""
    statements: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """The imports, outside of functions, by the name that they bind; none if what it means is
    decided by which of several runs."""


def names_in_cell(source: str, transform: Callable[[str], str]) -> CellNames:
    """The names of a cell as typed. `transform` is IPython's `shell.transform_cell`.

    A name counts as read if it is looked up, on any way through the cell, where the cell has not
    surely bound it before. What a function of the cell reads counts where its name is mentioned,
    and at the end of the cell. A cell that does not compile has no names: the rank says why.

    >>> names = names_in_cell("total = sum(x for x in data)\\nprint(total)", str)
    >>> sorted(names.reads), sorted(names.assigns)
    (['data', 'print', 'sum'], ['total'])
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rank that compiles it shows them
        try:
            code = transform(source)
            tree = ast.parse(code)
            # IPython compiles cells so: an `await` outside of functions is no error there.
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            # Compiled too, as the parser lets a `return` outside of functions pass. Without
            # `dont_inherit` this file's `from __future__ import annotations` would count.
            compiled = compile(tree, "<cell>", "exec", flags=flags, dont_inherit=True)
        except Exception:
            return CellNames()
        # The tree and not the compiled code: that has lost which way leads where.
        flow = Flow(transform)
        try:
            flow.run(tree.body)
        except RecursionError:
            return _names_without_flow(tree, compiled)
    sets = (flow.reads, flow.assigns, flow.imports, flow.deletes, flow.attributes)
    reads, assigns, imports, deletes, attributes = map(frozenset, sets)
    return CellNames(reads, assigns, imports, deletes, attributes, _statements(flow))


def _statements(flow: Flow) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, lines in flow.statements.items():
        # `import a.b` and `import a.c` both bind `a`, and a new rank needs both.
        is_certain = len(lines) == 1 or all(line.startswith(f"import {name}.") for line in lines)
        is_certain = is_certain and name not in flow.assigns | flow.deletes
        found[name] = tuple(lines) if is_certain else ()
    return found


def _names_without_flow(tree: ast.Module, code: types.CodeType) -> CellNames:
    """For code nested too deeply to walk through: whatever is looked up counts as read."""
    # There is code, as `compile` has succeeded: it goes deeper than our walk.
    instructions = [step for part in with_nested(code) for step in dis.get_instructions(part)]
    reads = {step.argval for step in instructions if step.opname in _LOADS}
    stores = {step.argval for step in instructions if step.opname in _STORES}
    deletes = {step.argval for step in instructions if step.opname in _DELETES}
    aliases = [node for node in ast.walk(tree) if isinstance(node, ast.alias)]
    imports = {alias.asname or alias.name.split(".")[0] for alias in aliases}
    own = frozenset(reads - {"get_ipython"}), frozenset(stores - imports)
    return CellNames(*own, frozenset(stores & imports), frozenset(deletes))


_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_STORES = {"STORE_NAME", "STORE_GLOBAL"}
_DELETES = {"DELETE_NAME", "DELETE_GLOBAL"}
