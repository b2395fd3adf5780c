"""Small random programs, and variables of a notebook that note what a program looks up."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c", "d", "e")
NAME = st.sampled_from(NAMES)
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
        coin = random.Random(seed)
        self.before = {name: Before() for name in NAMES}
        super().__init__(
            self.before,
            __builtins__={"__build_class__": __build_class__, "__import__": __import__},
            __name__="notebook",
            maybe=lambda: coin.random() < 0.6,
            new=Before,
            keep=lambda function: function,
            suppress=suppress,
            Exception=Exception,
            ValueError=ValueError,
            list=list,
            call=lambda value, *args: value(*args) if callable(value) else Before(),
            each=lambda value: value if isinstance(value, Iterable) else [Before(), Before()],
        )
        self.seen: set[str] = set()
        self.num_lookups = 0

    def __getitem__(self, name: str) -> Any:
        self.num_lookups += 1
        if self.num_lookups > NUM_LOOKUPS:
            raise TooMuch
        value = super().__getitem__(name)
        if name in self.before and value is self.before[name]:
            self.seen.add(name)
        return value

    def changed(self) -> set[str]:
        """The names that are bound to something else now."""
        return {name for name in NAMES if name in self and self.get(name) is not self.before[name]}


def expressions() -> st.SearchStrategy[str]:
    """Expressions that read and bind a few names."""
    leaves = NAME | st.just("new()") | NAME.map("call({})".format)

    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        two, three = st.tuples(inner, inner), st.tuples(inner, inner, inner)
        named = st.tuples(NAME, inner)
        return st.one_of(
            named.map(lambda e: "({} := {})".format(*e)),
            two.map(lambda e: "call({}, {})".format(*e)),
            two.map(lambda e: "(maybe() and {} or {})".format(*e)),
            two.map(lambda e: "({} if maybe() else {})".format(*e)),
            named.map(lambda e: "[{1} for {0} in each({0}) if {0}]".format(*e)),
            st.tuples(NAME, inner, NAME, inner).map(
                lambda e: "list({1} for {0} in each({3}) for {2} in each({0}))".format(*e)
            ),
            inner.map("(lambda *_: {})".format),
            st.tuples(NAME, inner, inner).map(lambda e: "(lambda {}={}, *_: {})".format(*e)),
            st.tuples(inner, NAME).map(lambda e: "call({}.{})".format(*e)),
            three.map(lambda e: "f'{{{}}}{{{}:{{{}}}}}'".format(*e)),
            two.map(lambda e: "{{{}: {}}}".format(*e)),
            two.map(lambda e: "({} == {})".format(*e)),
        )

    return st.recursive(leaves, larger, max_leaves=4)


EXPRESSION = expressions()


@st.composite
def blocks(draw: st.DrawFn, depth: int, where: frozenset[str], size: int = 3) -> list[str]:
    """The lines of statements; `where`: what they are in (a loop, a function)."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, size))):
        lines += draw(statements(depth, where))
    return lines


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@st.composite
def statements(draw: st.DrawFn, depth: int, where: frozenset[str]) -> list[str]:
    """The lines of one statement."""
    name, other, value = draw(NAME), draw(NAME), draw(EXPRESSION)
    simple = [
        f"{name} = {value}",
        f"{name} = {value}",
        f"{name} += {value}",
        f"{name}: {other} = {value}",
        f"{name}, {other} = {value}",
        f"{name}[{other}] = {value}",
        f"{name}[0] += {value}",
        f"{value}",
        f"call({name})",
        f"call({name}.{other})",
        f"del {name}",
        f"import math as {name}",
        f"from math import tau as {name}",
        "raise ValueError",
        f"assert {value}, {name}",
    ]
    if "loop" in where:
        simple += ["break", "continue"]
    if "function" in where:
        simple += [f"return {value}", f"yield {value}"]
    if depth == 0:
        return [draw(st.sampled_from(simple))]
    kind = draw(st.sampled_from(["simple", "simple", *COMPOUND]))
    if kind == "simple":
        return [draw(st.sampled_from(simple))]
    if kind in ("def", "class", "make"):
        return draw(definitions(kind, name, depth))

    def block(within: frozenset[str] = where) -> list[str]:
        return indented(draw(blocks(depth - 1, within)))

    return COMPOUND[kind](name, other, value, block, where)


Block = Callable[..., list[str]]
COMPOUND: dict[str, Callable[[str, str, str, Block, frozenset[str]], list[str]]] = {
    "if": lambda n, o, v, block, w: ["if maybe():", *block()],
    "else": lambda n, o, v, block, w: [f"if {v} and maybe():", *block(), "else:", *block()],
    "for": lambda n, o, v, block, w: [f"for {n} in each({o}):", *block(w | {"loop"})],
    "for else": lambda n, o, v, block, w: [
        *[f"for {n} in each({v}):", *block(w | {"loop"})],
        *["else:", *block()],
    ],
    "while": lambda n, o, v, block, w: ["while maybe():", *block(w | {"loop"})],
    "endless": lambda n, o, v, block, w: [
        *["while True:", "    new()", *block(w | {"loop"}), "    if maybe():", "        break"]
    ],
    "with": lambda n, o, v, block, w: [f"with {o} as {n}:", *block()],
    "suppress": lambda n, o, v, block, w: ["with suppress(Exception):", *block()],
    "try": lambda n, o, v, block, w: [
        *["try:", *block(), f"except Exception as {n}:", *block(), "else:", *block()]
    ],
    "finally": lambda n, o, v, block, w: [
        *["try:", *block(), "except ValueError:", *block()],
        *["finally:", *block(w - {"loop"})],
    ],
    "match": lambda n, o, v, block, w: [
        f"match {v}:",
        *indented([f"case [{n}, *{o}] if maybe():", *block()]),
        *indented([f"case {{'k': {n}, **{o}}} if {n} is not {o}:", *block()]),
        *indented([f"case 1 | {o}():", *block()]),
        *indented([f"case {o}:", *block()]),
    ],
    "def": lambda *_: [],
    "make": lambda *_: [],
    "class": lambda *_: [],
}


@st.composite
def definitions(draw: st.DrawFn, kind: str, name: str, depth: int) -> list[str]:
    """The lines of a function or class."""
    decorator = ["@keep"] if draw(st.integers(0, 5)) == 0 else []
    if kind == "class":
        body = draw(blocks(depth - 1, frozenset(), size=3))
        method = draw(definitions("def", draw(NAME), depth))
        base = draw(st.sampled_from(["", "(keep(object))"])).replace("object", "ValueError")
        return [*decorator, f"class {name}{base}:", *indented(body), *indented(method)]
    shared = draw(st.sets(NAME, max_size=2)) if kind == "make" else set()
    argument = draw(NAME.filter(lambda a: a not in shared) if len(shared) < 5 else NAME)
    default = draw(EXPRESSION)
    body = draw(blocks(depth - 1, frozenset({"function"}), size=3))
    start = [f"global {', '.join(sorted(shared))}"] if shared else []
    return [*decorator, f"def {name}({argument}={default}, *_):", *indented(start + body)]


PROGRAM = blocks(2, frozenset(), 5).map("\n".join)


def compiled(source: str) -> types.CodeType | None:
    """The code of a program; None if it is none."""
    try:
        return compile(source, "<cell>", "exec", dont_inherit=True)
    except SyntaxError:
        return None
