"""Options as fields of a frozen dataclass: what each takes and needs, checked, shown and explained.

Runs anywhere. The type of a field has the words that it takes, the docstring below it says what it
means: errors, help, completion and the reference read both.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import Check, as_written, choose, shown, suggest

_LITERAL = re.compile(r"(?:^|\| )Literal(\[[^]]*\])")  # not one within a sequence
_FIELD = re.compile(r'(?ms)^    # ---- ([^\n]+)|^    (\w+): .+?\n    """(.+?)"""$')


class Needs(NamedTuple):
    """Another option that an option works with only: one of `values`, or any that is given."""

    other: str
    values: tuple[str, ...]
    meant: str  # what an error offers for it


def option(default: Any, check: Check | None = None, needs: Needs | None = None) -> Any:
    """What it is unless given, its check beside its words, and what it needs to act."""
    about = {"check": check, "needs": needs}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


class Options:
    """Base of options, which are checked when they are made."""

    __slots__ = ()

    # A type checker would take what it accepts, any name, for what the class accepts.
    if not TYPE_CHECKING:
        # Not in `__init__`, which the dataclass writes. pickle and copy call this without values.
        def __new__(cls, *args: Any, **values: Any) -> Any:
            """Refuse names that are no option with a better word than Python's TypeError."""
            known = list(cls.__dataclass_fields__)
            if args:
                raise OptionsError(
                    f"{cls.__name__}({args[0]!r}, ...): options are given by name, as "
                    f"{cls.__name__}({known[0]}=...)."
                )
            for name in values:
                if name not in known:
                    where = f"`gpupool.{cls.__name__}?` explains them all." * (len(known) > 20)
                    answer = suggest(name, known, where)
                    raise OptionsError(f"{name!r} is not an option. {answer}")
            return object.__new__(cls)

    def __post_init__(self) -> None:
        """Refuse wrong values, keep each as its check gives it; then refuse what has no effect."""
        options = fields(self)  # type: ignore[arg-type]
        for one in options:
            value, words = getattr(self, one.name), _words(str(one.type))
            check = one.metadata.get("check")
            if value is None and one.default is None:
                continue
            if words and (isinstance(value, str) or check is None):
                choose(one.name, value, words)
            elif check is not None:
                # The dataclass is frozen, and not finished yet.
                object.__setattr__(self, one.name, check(one.name, value))
        # Only of what was given: a default that does nothing was nobody's wish.
        for one in options:
            needs = one.metadata.get("needs")
            if needs is None or not is_given(self, one.name):
                continue
            other = getattr(self, needs.other)
            if not (other in needs.values if needs.values else is_given(self, needs.other)):
                why = f"while {needs.other} is {shown(other)}: did you mean "
                raise without_effect(self, one.name, f"{why}{needs.other}={needs.meant}?")

    def __repr__(self) -> str:
        names = [one.name for one in fields(self)]  # type: ignore[arg-type]
        values = (f"{name}={as_written(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({', '.join(values)})"


def is_given(options: Any, name: str) -> bool:
    """Whether an option has another value than the one it has when left out."""
    default = options.__dataclass_fields__[name].default
    # A dataclass does not record what was passed: a default that was typed counts as left out.
    return bool(getattr(options, name) != ({} if default is MISSING else default))


def without_effect(options: Any, name: str, why: str) -> OptionsError:
    return OptionsError(f"{name}={written(options, name)} has no effect {why}")


def changed(options: Any) -> dict[str, str]:
    """The options that differ from the defaults, in short."""
    names = [one.name for one in fields(options) if is_given(options, one.name)]
    return {name: written(options, name) for name in names}


def written(options: Any, name: str) -> str:
    return shown(getattr(options, name))


def words_of(kind: type, name: str) -> tuple[str, ...]:
    """The words that an option takes; it may take other values too."""
    return _words(str(kind.__dataclass_fields__[name].type))  # type: ignore[attr-defined]


@cache
def _words(annotation: str) -> tuple[str, ...]:
    """
    >>> _words("Literal['fit', 'none'] | int")
    ('fit', 'none')
    """
    return tuple(word for found in _LITERAL.findall(annotation) for word in ast.literal_eval(found))


class _Annotation(str):
    """A type in a signature, which help shows as it is written here."""

    def __repr__(self) -> str:
        return str(self)


def _parameters(kind: type) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if one.default is MISSING else one.default,
            annotation=_Annotation(one.type),
        )
        for one in fields(kind)
    ]


def with_keywords(function: Callable[..., Any], kind: type) -> inspect.Signature:
    """The signature of `function`, for completion: all options instead of its last parameter."""
    signature = inspect.signature(function)
    own = dict(list(signature.parameters.items())[:-1])
    more = [one for one in _parameters(kind) if one.name not in own]
    return signature.replace(parameters=[*own.values(), *more])


def explain(kind: type) -> None:
    """Give a dataclass of options a docstring and a signature that show each of them."""
    options = _parameters(kind)
    defaults = {one.name: one.default for one in options}
    source = inspect.getsource(sys.modules[kind.__module__])  # that of a class takes 13 ms to find
    lines = [inspect.cleandoc(kind.__doc__ or "")]
    for heading, name, meaning in _FIELD.findall(source.partition(f"\nclass {kind.__name__}(")[2]):
        if heading:
            lines += ["", f"{heading[0].upper()}{heading[1:]}:"]
        elif name in defaults:
            lines += [f"  {name} = {defaults[name]!r}", f"    {meaning}"]
    kind.__doc__ = "\n".join(lines)
    kind.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
