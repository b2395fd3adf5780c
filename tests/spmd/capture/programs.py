"""Small random programs, and variables of a notebook that note what a program looks up."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

NAMES = ("a", "b", "c")
NUM_LOOKUPS = 300


class TooMuch(BaseException):
    """The program has run for long enough."""


class Before:
    """What the notebook has bound to a name: usable for everything, for nothing important."""

    def __call__(self, *args: Any) -> Any:
        return Before()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Before()

    def __iter__(self) -> Iterator[Any]:
        return iter((Before(), Before()))

    def __getitem__(self, index: Any) -> Any:
        return Before()

    def __setitem__(self, index: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return Before()

    def __exit__(self, *error: object) -> None:
        pass

    def __add__(self, other: Any) -> Any:
        return Before()


class Namespace(dict[str, Any]):
    """The variables of a notebook; notes which of its values are looked up."""

    def __init__(self, seed: int) -> None:
        self.seen: set[str] = set()
        self._num_lookups = 0
        self._coin = random.Random(seed)
        self._before = {name: Before() for name in NAMES}
        super().__init__(
            self._before,
            __builtins__={"__build_class__": __build_class__, "__import__": __import__},
            __name__="notebook",
            maybe=self._maybe,
            new=lambda: self._note(Before()),
            call=lambda value, *args: self._note(value)(*args) if callable(value) else Before(),
            each=lambda value: self._note(value) if isinstance(value, Iterable) else [1, 2],
            keep=lambda function: function,
            suppress=suppress,
            Exception=Exception,
            ValueError=ValueError,
            list=list,
        )

    def _maybe(self) -> bool:
        self._note(None)
        return self._coin.random() < 0.6

    def _note(self, value: Any) -> Any:
        """Look at a value: a class body does not ask `__getitem__` for globals."""
        self._num_lookups += 1
        if self._num_lookups > NUM_LOOKUPS:
            raise TooMuch
        self.seen |= {name for name in NAMES if self._before[name] is value}
        return value

    def __getitem__(self, name: str) -> Any:
        return self._note(super().__getitem__(name))

    def changed(self) -> set[str]:
        """The names that are bound to something else now."""
        return {name for name in NAMES if name in self and self.get(name) is not self._before[name]}


class Writer:
    """Writes programs; `choose` takes one of several words, each time it is asked."""

    def __init__(self, choose: Callable[[Sequence[str]], str]) -> None:
        self._choose = choose

    def program(self) -> str:
        """A program of a few statements."""
        return "\n".join(self._block(2, "", sizes="234567"))

    def function(self) -> str:
        """The definition of a function `f`."""
        return "\n".join(self._definition("f", self._choose(["def", "shared"]), 2))

    def _name(self) -> str:
        return self._choose(NAMES)

    def _expression(self, depth: int = 2) -> str:
        form = self._choose(["new()"] * 8 + ["NAME"] * 3 + ["call(NAME)"] * 3 + EXPRESSIONS)
        if depth == 0:
            form = self._choose(["new()", "NAME"])
        name = self._name()
        while "SAME" in form:
            form = form.replace("SAME", name)
        while "NAME" in form:
            form = form.replace("NAME", self._name(), 1)
        while "EXPR" in form:
            form = form.replace("EXPR", self._expression(depth - 1), 1)
        return form

    def _block(self, depth: int, within: str, sizes: str = "112") -> list[str]:
        """The lines of statements in a loop, a function, or both (`within`)."""
        number = int(self._choose(sizes))
        return [line for _ in range(number) for line in self._statement(depth, within)]

    def _statement(self, depth: int, within: str) -> list[str]:
        forms = SIMPLE + (["break", "continue"] if "loop" in within else [])
        if "function" in within:
            forms = forms + ["return NAME"] * 8 + ["return EXPR", "yield EXPR"]
        kind = self._choose(["simple"] * 10 + ["def"] * 4 + KINDS) if depth else "simple"
        if kind == "simple":
            return [self._fill(self._choose(forms))]
        if kind in ("def", "shared", "class"):
            return self._definition(self._name(), kind, depth)
        lines = []
        in_body = f"{within} loop" if kind in ("for", "for else", "while", "endless") else within
        for line in COMPOUND[kind]:
            margin, block, _ = line.partition("...")
            if block:
                lines += [margin + inside for inside in self._block(depth - 1, in_body)]
            else:
                lines.append(self._fill(line))
            if line in ("else:", "finally:"):
                in_body = within.replace("loop", "")
        return lines

    def _definition(self, name: str, kind: str, depth: int) -> list[str]:
        decorator = ["@keep"] if self._choose(["", "", "", "keep"]) else []
        if kind == "class":
            base = self._choose(["", "", "(keep(ValueError))"])
            method = self._definition(self._name(), "def", depth)
            body = self._block(depth - 1, "") + method
            return [*decorator, f"class {name}{base}:", *[f"    {line}" for line in body]]
        body = self._block(depth - 1, "function")
        first, second = self._name(), self._name()
        argument = self._choose(["", "", f"{first}={self._expression(1)}, "])
        if kind == "shared":
            body.insert(0, f"global {second}")
        return [*decorator, f"def {name}({argument}*_):", *[f"    {line}" for line in body]]

    def _fill(self, form: str) -> str:
        while "NAME" in form:
            form = form.replace("NAME", self._name(), 1)
        while "EXPR" in form:
            form = form.replace("EXPR", self._expression(), 1)
        return form


EXPRESSIONS = [
    "(NAME := EXPR)",
    "call(EXPR, EXPR)",
    "call(EXPR.NAME)",
    "(maybe() and EXPR or EXPR)",
    "(EXPR if maybe() else EXPR)",
    "(EXPR == EXPR == EXPR)",
    "[EXPR for SAME in each(NAME) if SAME]",
    "list(EXPR for SAME in each(NAME) for NAME in each(SAME))",
    "list(EXPR for NAME in each(EXPR))",
    "(EXPR for NAME in each(EXPR))",
    "(lambda *_: EXPR)",
    "(lambda *_: NAME)",
    "(lambda *_: call(NAME))",
    "(lambda NAME=EXPR, *_: EXPR)",
    "{EXPR: EXPR}",
    "f'{EXPR}{NAME:{NAME}}'",
]
SIMPLE = [
    *["NAME = new()", "call(NAME)"] * 6,
    *["NAME = EXPR", "call(NAME.NAME)"] * 2,
    "NAME = NAME",
    "NAME += EXPR",
    "NAME: NAME = EXPR",
    "NAME, NAME = EXPR",
    "NAME[NAME] = EXPR",
    "NAME[0] += EXPR",
    "EXPR",
    "del NAME",
    "import math as NAME",
    "from math import tau as NAME",
    "raise ValueError",
    "assert EXPR, NAME",
]
COMPOUND = {
    "if": ["if maybe():", "    ..."],
    "if else": ["if EXPR and maybe():", "    ...", "else:", "    ..."],
    "for": ["for NAME in each(NAME):", "    ..."],
    "for else": ["for NAME in each(EXPR):", "    ...", "else:", "    ..."],
    "while": ["while maybe():", "    ..."],
    "endless": ["while True:", "    new()", "    ...", "    if maybe():", "        break"],
    "with": ["with NAME as NAME:", "    ..."],
    "suppress": ["with suppress(Exception):", "    ..."],
    "try": ["try:", "    ...", "except Exception as NAME:", "    ...", "else:", "    ..."],
    "pass": ["try:", "    ...", "except Exception:", "    pass"],
    "finally": ["try:", "    ...", "except ValueError:", "    ...", "finally:", "    ..."],
    "match": [
        *["match EXPR:", "    case [NAME, *_] if maybe():", "        ..."],
        *["    case {'k': NAME, **rest}:", "        ...", "    case 1 | NAME():", "        ..."],
        *["    case NAME:", "        ..."],
    ],
}
KINDS = [*COMPOUND, "def", "shared", "class", "class"]


def compiled(source: str) -> types.CodeType | None:
    """The code of a program; None if it is none."""
    try:
        return compile(source, "<cell>", "exec", dont_inherit=True)
    except SyntaxError:
        return None
