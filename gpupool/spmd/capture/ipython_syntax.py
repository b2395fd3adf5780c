"""The code inside what IPython makes of its own syntax: magics, `!command`, `x?`. Client, pure.

Private to `capture`. What each magic does with its line is in IPython's documentation.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Transform: TypeAlias = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Piece:
    """Statements inside a string that IPython runs.

    how: "here", as if they stood there; "guarded", the same, but an exception does not leave them;
    "inside", as the body of a function: what they bind is gone afterwards.
    """

    how: Literal["here", "guarded", "inside"]
    body: list[ast.stmt]


def pieces_of_call(call: ast.Call, transform: Transform) -> list[Piece] | None:
    """The code that a call of `get_ipython()` runs, in order; None: it is another call."""
    function = call.func
    # IPython's transformers write every magic and `!command` as a method of `get_ipython()`.
    if not (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Call)
        and isinstance(function.value.func, ast.Name)
        and function.value.func.id == "get_ipython"
    ):
        return None
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    texts = [word for word in words if isinstance(word, str)]
    # An argument that is no constant was written by the user, and is ordinary code.
    if len(texts) != len(call.args):
        return None
    match function.attr, texts:
        case "run_line_magic", [name, line]:
            return list(_line_magic(name, line, transform))
        case "run_cell_magic", [name, line, body]:
            return list(_cell_magic(name, line, body, transform))
        case (("system" | "getoutput"), [command]):
            return list(_expanded(command))
    return None


# Options as for getopt. These magics run what follows as code.
_OPTIONS = {
    "timeit": "n:r:tcp:qov:",
    "prun": "D:l:rs:T:q",
    "memit": "r:t:i:I:coz",
    "lprun": "rsf:m:D:T:u:z",
    "mprun": "rf:T:c",
}
_LONG_OPTIONS = {
    "time": re.compile(r"(^|\s)--no-raise-error(?=\s|$)"),
    "debug": re.compile(r"^\s*(-b|--breakpoint)[ =]?\s*\S+"),
}
_ABOUT_OBJECTS = {"pinfo", "pinfo2", "psearch", "pdef", "pdoc", "psource", "pfile"}
_OTHER_LANGUAGES = {"script", "bash", "sh", "perl", "python", "python2", "python3", "pypy", "ruby"}
_SHELL = {"sx", "system", "!"}


def _line_magic(name: str, line: str, transform: Transform) -> Iterator[Piece]:
    if name in _OPTIONS or name in _LONG_OPTIONS:
        yield from _timed(name, line, None, transform)
    elif name in _ABOUT_OBJECTS:
        yield from _looked_up(line.strip().rstrip("*"))
    elif name == "xdel":
        yield from _statement("del", line.split()[-1:])
    else:
        yield from _expanded(line)
        if name == "config":
            yield from _looked_up(line.partition("=")[2])


def _cell_magic(name: str, line: str, body: str, transform: Transform) -> Iterator[Piece]:
    if name in _OPTIONS or name in _LONG_OPTIONS:
        yield from _timed(name, line, body, transform)
        return
    yield from _expanded(line)
    if name == "capture":
        yield Piece("guarded", _parsed(body, transform))
        yield from _statement("=", [word for word in line.split() if word[0] != "-"][:1])
    elif name in _SHELL:
        yield from _expanded(body)
        yield from _statement("=", re.findall(r"--out[ =]\s*(\w+)", line))
    elif name in _OTHER_LANGUAGES:
        yield from _statement("=", re.findall(r"--(?:out|err|proc)[ =]\s*(\w+)", line))


def _timed(name: str, line: str, cell: str | None, transform: Transform) -> Iterator[Piece]:
    """What a magic that runs code runs. Its line is code, too; variables are not expanded."""
    if name in _LONG_OPTIONS:
        options: dict[str, list[str]] = {}
        line = _LONG_OPTIONS[name].sub(" ", line)
    else:
        options, line = _split_options(line, _OPTIONS[name])
    for function in options.get("f", ()):
        yield from _looked_up(function)
    body = _parsed(line.strip(), transform)
    if cell is not None:
        body += _parsed(cell, transform)
    yield Piece("inside" if name == "timeit" else "here", body)
    yield from _statement("=", options.get("v", ()))


def _split_options(line: str, spec: str) -> tuple[dict[str, list[str]], str]:
    """The options at the start of a line, and the rest as it is."""
    options: dict[str, list[str]] = {}
    while option := re.match(r"\s*-(\w)", line):
        letter, rest = option[1], line[option.end() :]
        if letter + ":" in spec:
            value = re.match(r"\s*(\"[^\"]*\"|'[^']*'|\S*)", rest)
            assert value is not None
            options.setdefault(letter, []).append(value[1].strip("\"'"))
            line = rest[value.end() :]
        elif letter in spec:
            line = f" -{rest}" if rest[:1].isalnum() else rest
        else:
            break
    return options, line


def _looked_up(expression: str) -> Iterator[Piece]:
    """An expression whose value is looked at."""
    # In parentheses it may begin with a blank, as in `{ x }`.
    if body := _parsed(f"({expression})"):
        yield Piece("inside", body)


def _statement(kind: Literal["=", "del"], names: list[str] | tuple[str, ...]) -> Iterator[Piece]:
    """What a magic does to the variables of the notebook, as a statement."""
    for name in filter(str.isidentifier, names):
        change = f"del {name}" if kind == "del" else f"{name} = None"
        # `global`: magics bind in the notebook's namespace, whichever function calls them.
        yield Piece("here", _parsed(f"global {name}\n{change}"))


# As in IPython.utils.text.DollarFormatter
_DOLLAR = re.compile(r"\$(\$?[\w\.]+)(?=([^']*'[^']*')*[^']*$)")


def _expanded(text: str) -> Iterator[Piece]:
    """The expressions in `{expression}` and `$name`, as IPython fills them in."""
    try:
        for literal, field, spec, _ in string.Formatter().parse(text):
            for name, _rest in _DOLLAR.findall(literal):
                if not name.startswith("$"):
                    yield from _looked_up(name.rstrip("."))
            if field:
                yield from _looked_up(f"{field}:{spec}" if spec else field)
    except ValueError:  # a single brace: IPython leaves such a text alone
        return


def _parsed(source: str, transform: Transform = str) -> list[ast.stmt]:
    """The statements; none if this is not Python: the rank that runs it says so."""
    try:
        return ast.parse(transform(source)).body
    except Exception:
        return []
