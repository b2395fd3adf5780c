"""Which names of the notebook a cell reads and binds, found by compiling it. Client, pure.

Invisible are names that only exist as text when the cell runs: `globals()["x"]`, `eval("x")`,
`get_ipython().user_ns["x"]`, and what `from m import *` or `%run` binds.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType

from gpupool.core.wire.global_names import globals_in, names_in_code
from gpupool.spmd.magics import Transform, compiled_cell


@dataclass(frozen=True, slots=True)
class CellNames:
    """The global names of a cell, `get_ipython` aside. A name can be in several of the sets."""

    reads: frozenset[str] = frozenset()
    """The cell may see what the notebook has bound to these. Builtins count too."""
    assigns: frozenset[str] = frozenset()
    """Bound by the cell other than by `import`, on some way through it or in a function of it."""
    binds: frozenset[str] = frozenset()
    """All that it binds or unbinds. If it reads one of these it may have bound it before."""
    deletes: frozenset[str] = frozenset()
    """Unbound, by `del` or at the end of `except ... as`."""
    attributes: frozenset[str] = frozenset()
    """What stands behind a dot, which may be a submodule."""
    statements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The imports that a new rank repeats, by the name that they bind."""
    inside: frozenset[str] = frozenset()
    """Read by its functions and classes, maybe when they are called."""


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
        compiled = compiled_cell(source, transform)
    if compiled is None:
        return CellNames()
    tree, code = compiled
    found = globals_in(code, is_cell=True)
    nodes = list(ast.walk(tree))
    # Bound while a handler runs, and unbound at its end: not what the cell assigns.
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)} & found.deletes
    bound = found.assigns | found.deletes
    statements: dict[str, tuple[str, ...]] = {}
    for name, line in _imports(tree.body):
        statements[name] = () if name in bound else (*statements.get(name, ()), line)
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return CellNames(
        frozenset(found.reads - {"get_ipython"}),
        frozenset(found.assigns - caught),
        frozenset(bound | found.imports),
        frozenset(found.deletes),
        frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        statements,
        frozenset[str]().union(*(names_in_code(one)[0] for one in inside)),
    )


def _imports(body: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Each name that a statement imports, and the statement; all of a `try` that only imports."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                alone = type(node)(**{**vars(node), "names": [alias]})
                if alias.name != "*":
                    yield alias.asname or alias.name.split(".")[0], ast.unparse(alone)
        elif isinstance(node, ast.Try):
            inside = [one for one in ast.walk(node) if isinstance(one, ast.stmt)][1:]
            kinds = ast.Import | ast.ImportFrom | ast.Pass | ast.Try
            if all(isinstance(one, kinds) for one in inside):
                yield from ((name, ast.unparse(node)) for name in dict(_imports(inside)))
