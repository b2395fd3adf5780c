"""Which names of the notebook a cell reads and binds, found by compiling it. Client, pure.

Invisible are names that only exist as text when the cell runs: `globals()["x"]`, `eval("x")`,
`get_ipython().user_ns["x"]`, and what `from m import *` or `%run` binds.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpupool.core.wire.global_names import globals_in
from gpupool.spmd.magics import FUNCTION, Transform, compiled_cell, put_in_code


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
    """Unbound, by `del` or at the end of `except ... as`."""
    attributes: frozenset[str] = field(default=frozenset(), compare=False)
    """What stands behind a dot, which may be a submodule."""
    statements: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """The imports, outside of functions, by the name that they bind; none if what it means is
    decided by which of several runs."""

    @property
    def binds(self) -> frozenset[str]:
        """All that it binds or unbinds. If it reads one of these it may have bound it before."""
        return self.assigns | self.imports | self.deletes


def names_in_cell(source: str, transform: Transform) -> CellNames:
    """The names of a cell as typed. `transform` is IPython's `shell.transform_cell`.

    A name counts as read if it is looked up anywhere, unless the cell surely binds it before. A
    cell that does not compile has no names: the rank says why.

    >>> names = names_in_cell("total = sum(x for x in data)\\nprint(total)", str)
    >>> sorted(names.reads), sorted(names.assigns)
    (['data', 'print', 'sum'], ['total'])
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rank that compiles it shows them
        try:
            tree = ast.parse(transform(source))
            put_in_code(tree, transform)
            code = compiled_cell(tree)
        except Exception:
            return CellNames()
    found, body = globals_in(code, is_cell=True), tree.body
    assigns = found.assigns
    caught = [node for node in _outside(body) if isinstance(node, ast.ExceptHandler) and node.name]
    if caught:
        # Bound while the handler runs, and unbound at its end: not what the cell assigns.
        for node in caught:
            node.name = None
        assigns = globals_in(compiled_cell(tree), is_cell=True).assigns
    return CellNames(
        frozenset(found.reads - {"get_ipython"}),
        frozenset(assigns - {FUNCTION}),
        frozenset(found.imports),
        frozenset(found.deletes),
        frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        _statements(body, assigns | found.deletes),
    )


def _outside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements outside of functions and classes, with those inside of other statements."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "handlers", "cases", "finalbody"):
                yield from _outside(getattr(node, part, ()))


def _statements(body: list[ast.stmt], other: set[str]) -> dict[str, tuple[str, ...]]:
    """The imports; what is bound by one of several, or otherwise too, by nothing certain."""
    choices: dict[ast.AST, str] = {}  # statement -> the `try` that has another one in its place
    lines: dict[str, dict[str, None]] = {}
    for node in _outside(body):
        if isinstance(node, ast.Try) and _only_imports(node):
            choices = dict.fromkeys(ast.walk(node), ast.unparse(node)) | choices
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            alone = type(node)(**{**vars(node), "names": [alias]})
            line = choices.get(node) or ast.unparse(alone)
            lines.setdefault(alias.asname or alias.name.split(".")[0], {})[line] = None
    lines.pop("*", None)
    return {
        name: tuple(found) if name not in other and _mean_one_thing(name, found) else ()
        for name, found in lines.items()
    }


def _only_imports(node: ast.Try) -> bool:
    kinds = ast.Import, ast.ImportFrom, ast.Pass, ast.Try
    return all(isinstance(one, kinds) for one in ast.walk(node) if isinstance(one, ast.stmt))


def _mean_one_thing(name: str, lines: Mapping[str, None]) -> bool:
    # `import a.b` and `import a.c` both bind `a`, and a new rank needs both.
    return len(lines) == 1 or all(line.startswith(f"import {name}.") for line in lines)
