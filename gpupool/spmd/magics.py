"""The code inside what IPython makes of its own syntax: magics, `!command`, `x?`. Client, pure.

What each magic does with its line is in IPython's documentation.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType
from typing import TypeAlias

Transform: TypeAlias = Callable[[str], str]

# Their line is code, after options; that of the others may have `{expression}` and `$name` in it.
_RUN_CODE = {"time", "timeit", "prun", "memit", "lprun", "mprun", "debug", "config"}
_RUN_CODE |= {"pinfo", "pinfo2", "pdef", "pdoc", "psource", "pfile"}
_SHELL = {"sx", "system", "!"}
_RESULTS = re.compile(r"--(?:out|err|proc)[ =]\s*(\w+)")
# As in IPython.utils.text.DollarFormatter
_DOLLAR = re.compile(r"\$(\$?[\w\.]+)(?=(?:[^']*'[^']*')*[^']*$)")
FUNCTION = "__magic__"
"""The name of functions around code whose names are its own."""


def compiled_cell(tree: ast.Module) -> CodeType:
    """A cell as IPython compiles it: an `await` outside of functions is no error."""
    # Without `dont_inherit` this file's `from __future__ import annotations` would count.
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code: CodeType = compile(tree, "<cell>", "exec", flags=flags, dont_inherit=True)
    return code


def put_in_code(tree: ast.Module, transform: Transform) -> None:
    """Put the code that magics run into a cell, before the statements that call them."""
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                statements[:] = [s for one in statements for s in (*_code_of(one, transform), one)]


def _code_of(statement: ast.stmt, transform: Transform) -> Iterator[ast.stmt]:
    call = getattr(statement, "value", None)  # of an expression, or `x = %magic`
    match call:
        # IPython's transformers write every magic and `!command` so.
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), method)):
            texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        case _:
            return
    match method, texts:
        case "run_line_magic", [str(name), str(line)]:
            found = _magic(name, line, "", transform)
        case "run_cell_magic", [str(name), str(line), str(body)]:
            found = _magic(name, line, body, transform)
        case (("system" | "getoutput"), [str(command)]):
            found = _expressions(command)
        case _:
            return
    for new in found:
        for node in ast.walk(new):
            ast.copy_location(node, statement)  # so it counts as a part of that
        yield new


def _magic(name: str, line: str, body: str, transform: Transform) -> Iterator[ast.stmt]:
    if name in _RUN_CODE:
        yield from _timed(name, line.strip(), body, transform)
        return
    yield from _expressions(f"{line}\n{body}" if name in _SHELL else line)
    results = _RESULTS.findall(line)
    if name == "capture":
        yield from _parsed(body, transform) or ()
        results = [word for word in line.split() if word[0] != "-"][:1]
    for result in results:  # it is the notebook's, whichever function runs the magic
        yield from _inside(_parsed(f"global {result}\n{result} = None"))
    for gone in line.split()[-1:] if name == "xdel" else ():
        yield from _inside(_parsed(f"global {gone}\ndel {gone}"))


def _timed(name: str, line: str, body: str, transform: Transform) -> Iterator[ast.stmt]:
    """What a magic that runs code runs: what is Python of its line, without the options before."""
    while line.startswith("-") or (code := _parsed(line, transform)) is None:
        word, _, line = line.partition(" ")
        line = line.strip()
        if word[0] != "-":  # of `-f function`
            yield from _parsed(f"({word})") or ()
    code += _parsed(body, transform) or ()
    yield from _inside(code) if name == "timeit" else code


def _expressions(text: str) -> Iterator[ast.stmt]:
    """The expressions in `{expression}` and `$name`, as IPython fills them in."""
    with suppress(ValueError):  # a single brace: IPython leaves such a text alone
        for literal, field, spec, _ in string.Formatter().parse(text):
            names = [name.rstrip(".") for name in _DOLLAR.findall(literal) if name[0] != "$"]
            for expression in (*names, f"{field}:{spec}" if spec else field):
                # in parentheses it may begin with a blank, as in `{ x }`
                yield from _parsed(f"({expression})") or () if expression else ()


def _inside(body: list[ast.stmt] | None) -> list[ast.stmt]:
    """A function with this body: what it binds is gone afterwards, what is global is not."""
    (function,) = ast.parse(f"def {FUNCTION}(): pass").body
    assert isinstance(function, ast.FunctionDef)
    function.body = body or function.body
    return [function]


def _parsed(source: str, transform: Transform = str) -> list[ast.stmt] | None:
    """The statements, with those inside of them; None if this is not Python."""
    try:
        tree = ast.parse(transform(source))
        put_in_code(tree, transform)
        compiled_cell(tree)
    except Exception:  # the rank that runs it says why
        return None
    return tree.body
