"""Cells as IPython compiles them, with the code inside of magics and `!command`. Client, pure.

What each magic does with its line is in IPython's documentation.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CodeType
from typing import TypeAlias

Transform: TypeAlias = Callable[[str], str]

# Their line is code, after options; that of the others may have `{expression}` and `$name` in it.
_RUN_CODE = {"time", "timeit", "prun", "pinfo", "pinfo2", "pdef", "pdoc", "psource", "pfile"}
# As in IPython.utils.text.DollarFormatter
_DOLLAR = re.compile(r"\$(\$?[\w\.]+)(?=(?:[^']*'[^']*')*[^']*$)")


def compiled_cell(source: str, transform: Transform) -> tuple[ast.Module, CodeType] | None:
    """A cell with what its magics run before each of them; None if it is not Python.

    As IPython compiles it: an `await` outside of functions is no error.
    """
    try:
        tree = ast.parse(transform(source))
        for node in list(ast.walk(tree)):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    code = [(*_code_of(one, transform), one) for one in statements]
                    statements[:] = [statement for some in code for statement in some]
        # Without `dont_inherit` this file's `from __future__ import annotations` would count.
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return tree, compile(tree, "<cell>", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # of IPython's transformers, or `compile`
        return None


def _code_of(statement: ast.stmt, transform: Transform) -> Iterable[ast.stmt]:
    call = getattr(statement, "value", None)  # of an expression, or `x = %magic`
    match call:
        # IPython's transformers write every magic and `!command` so.
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), method)):
            texts = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
        case _:
            return []
    match method, texts:
        case (("run_line_magic" | "run_cell_magic"), [name, line, *body]):
            found = list(_magic(name, line.strip(), "".join(body), transform))
        case (("system" | "getoutput"), [command]):
            found = list(_expressions(command))
        case _:
            return []
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
        for literal, field, spec, _ in string.Formatter().parse(text):
            names = [name.rstrip(".") for name in _DOLLAR.findall(literal) if name[0] != "$"]
            for expression in (*names, f"{field}:{spec}" if spec else field):
                # in parentheses it may begin with a blank, as in `{ x }`
                yield from _parsed(f"({expression})") or () if expression else ()


def _parsed(source: str, transform: Transform = str) -> list[ast.stmt] | None:
    """The statements, with those inside of them; None if this is not Python."""
    found = compiled_cell(source, transform)
    return found and found[0].body
