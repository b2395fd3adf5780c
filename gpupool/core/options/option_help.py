"""What a reader and an editor learn of options: names, defaults, words, meanings. Runs anywhere.

All of it is read from the dataclass that has the options.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

_LITERAL = re.compile(r"(?:^|\| )Literal(\[[^]]*\])")  # not one within a sequence
_INDENT = " " * 8


class Annotation(str):
    """A type in a signature, which help shows as it is written here."""

    def __repr__(self) -> str:
        return str(self)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it names.

        >>> Annotation("Literal['fit', 'none'] | int").words
        ('fit', 'none')
        """
        return tuple(word for found in _LITERAL.findall(self) for word in ast.literal_eval(found))


class OptionHelp(NamedTuple):
    """What a reader wants to know of one option."""

    name: str
    default: str
    """As it is written; "{}" of a dict."""
    words: tuple[str, ...]
    """The words that it takes, if any; it may take other values too."""
    meaning: str
    """Its docstring."""
    heading: str
    """That of the group in which it stands."""


class Made:
    """A class attribute that is made when it is read: `import gpupool` does not wait for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = cache(make)

    def __get__(self, one: object, kind: type) -> Any:
        return self._make()


def parameters(kind: type) -> list[inspect.Parameter]:
    """The options of a dataclass as parameters by name, with their defaults and words."""
    names = vars(sys.modules[kind.__module__])

    def written(found: re.Match[str]) -> str:
        # The names of our aliases say nothing to a reader.
        value = names.get(found[0])
        return f"Literal{list(get_args(value))}" if get_origin(value) is Literal else found[0]

    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if one.default is MISSING else one.default,
            annotation=Annotation(re.sub(r"\b[A-Z]\w+", written, str(one.type))),
        )
        for one in fields(kind)
    ]


def option_help(kind: type) -> list[OptionHelp]:
    """Every option of a dataclass with its meaning, read from its source.

    Raises:
        OSError: the source is not there.
    """
    lines, _ = inspect.getsourcelines(kind)
    shown = {one.name: one for one in parameters(kind)}
    (class_,) = ast.parse("".join(lines)).body
    assert isinstance(class_, ast.ClassDef)
    headings = [
        (number, line.partition("# ---- ")[2].strip())
        for number, line in enumerate(lines, 1)
        if "# ---- " in line
    ]
    found = []
    for one, below in zip(class_.body, class_.body[1:], strict=False):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        name = one.target.id
        assert isinstance(below, ast.Expr), f"{name} has no docstring"
        assert isinstance(below.value, ast.Constant)
        default, words = repr(shown[name].default), shown[name].annotation.words
        meaning = inspect.cleandoc(str(below.value.value))
        heading = [text for number, text in headings if number < one.lineno][-1]
        found.append(OptionHelp(name, default, words, meaning, heading))
    return found


def manual(kind: type, head: str) -> str:
    """The docstring `head` of a dataclass, with every option below it."""
    lines = [head]
    try:
        options = option_help(kind)
    except OSError:  # a package without its sources
        return head
    heading = ""
    for option in options:
        if option.heading != heading:
            heading = option.heading
            lines += ["", f"{heading[0].upper()}{heading[1:]}:"]
        named = " ".join(f'"{word}"' for word in option.words if f'"{word}"' not in option.meaning)
        meaning = f"{option.meaning} {'One of: ' + named if named else ''}"
        shown = textwrap.fill(meaning, 92, initial_indent=_INDENT, subsequent_indent=_INDENT)
        lines += [f"    {option.name} = {option.default}", shown]
    return "\n".join(lines)
