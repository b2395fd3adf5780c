"""Which names of the notebook a cell reads and binds, found by compiling it. Client, pure.

It is compiled as IPython does it, with the code inside of magics and `!command`: what each magic
does with its line is in IPython's documentation. Invisible are names that only exist as text when
the cell runs: `globals()["x"]`, `eval("x")`, `get_ipython().user_ns["x"]`, and what
`from m import *` or `%run` binds.
"""

from __future__ import annotations

import ast
import re
import string
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType

from gpupool.core.wire.global_names import globals_in, names_in_code

Transform = Callable[[str], str]

# Their line is code, after options; that of the others may have `{expression}` and `$name` in it.
_RUN_CODE = {"time", "timeit", "prun", "pinfo", "pinfo2", "pdef", "pdoc", "psource", "pfile"}
# As in IPython.utils.text.DollarFormatter
_DOLLAR = re.compile(r"\$(\$?[\w\.]+)(?=(?:[^']*'[^']*')*[^']*$)")


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
        compiled = _compiled(source, transform)
    if compiled is None:
        return CellNames()
    tree, code = compiled
    found = globals_in(code, is_cell=True)
    nodes = list(ast.walk(tree))
    # Bound while a handler runs, and unbound at its end: not what the cell assigns.
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)} & found.deletes
    bound = found.assigns | found.deletes
    statements: dict[str, tuple[str, ...]] = {}
    for name, line in _imports(tree):
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


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that a statement of the cell imports, whatever happens, and that statement."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            alone = type(node)(**{**vars(node), "names": [alias]})
            if alias.name != "*":
                yield alias.asname or alias.name.split(".")[0], ast.unparse(alone)


def _compiled(source: str, transform: Transform) -> tuple[ast.Module, CodeType] | None:
    """A cell with what its magics run before each of them; None if it is not Python."""
    try:
        tree = ast.parse(transform(source))
        for node in list(ast.walk(tree)):
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                if isinstance(statements, list):
                    statements[:] = [
                        one for each in statements for one in (*_code_of(each, transform), each)
                    ]
        # Without `dont_inherit` this file's `from __future__ import annotations` would count.
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return tree, compile(tree, "<cell>", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # of IPython's transformers, or `compile`
        return None


def _code_of(statement: ast.stmt, transform: Transform) -> list[ast.stmt]:
    """What a magic or `!command` runs; nothing of other statements."""
    call = getattr(statement, "value", None)  # of an expression, or `x = %magic`
    match call:
        # IPython's transformers write every magic and `!command` so.
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), method)):
            texts = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
        case _:
            return []
    found: list[ast.stmt] = []
    match method, texts:
        case (("run_line_magic" | "run_cell_magic"), [name, line, *body]):
            found = list(_magic(name, line.strip(), "".join(body), transform))
        case (("system" | "getoutput"), [command]):
            found = list(_expressions(command))
    for node in (node for new in found for node in ast.walk(new)):
        ast.copy_location(node, statement)  # so it counts as a part of that
    return found


def _magic(name: str, line: str, body: str, transform: Transform) -> Iterator[ast.stmt]:
    if name == "capture":
        yield from _parsed(body, transform) or ()
        for result in [word for word in line.split() if word[0] != "-"][:1]:
            yield from _parsed(f"{result} = None") or ()
    elif name in _RUN_CODE:
        while line.startswith("-") or (code := _parsed(line, transform)) is None:  # options
            line = line.partition(" ")[2].strip()
        yield from code
        yield from _parsed(body, transform) or ()
    else:
        yield from _expressions(line)


def _expressions(text: str) -> Iterator[ast.stmt]:
    """The expressions in `{expression}` and `$name`, as IPython fills them in."""
    with suppress(ValueError):  # a single brace: IPython leaves such a text alone
        for literal, field_name, spec, _ in string.Formatter().parse(text):
            names = [name.rstrip(".") for name in _DOLLAR.findall(literal) if name[0] != "$"]
            for expression in (*names, f"{field_name}:{spec}" if spec else field_name):
                # in parentheses it may begin with a blank, as in `{ x }`
                yield from _parsed(f"({expression})") or () if expression else ()


def _parsed(source: str, transform: Transform = str) -> list[ast.stmt] | None:
    """The statements, with those inside of them; None if this is not Python."""
    found = _compiled(source, transform)
    return found and found[0].body
