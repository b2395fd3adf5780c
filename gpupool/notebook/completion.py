"""Tab completion of %gpupool, %%spmd and their options. Runs on the client."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from gpupool.core.options import PROFILES
from gpupool.core.parcels import namespace
from gpupool.notebook.arguments import COMMANDS, MagicParser, spmd_parser
from gpupool.pool.composite import Composite


def complete(line: str, variables: Iterable[str] = (), composites: Iterable[str] = ()) -> list[str]:
    """The words that may stand at the end of `line`, in place of its last word; [] elsewhere.

    Args:
        variables: the names of environment variables that `env` may name.
        composites: the notebook's names for what ranks have, that `sync` may name.

    >>> complete("%gpupool st")
    ['status', 'start', 'stop']
    >>> complete("%%spmd --view r")
    ['ranks', 'raw']
    """
    magic, *words = line.split(" ")
    typed = words[-1] if words else ""
    before = [word for word in words[:-1] if word]
    if not words:
        return []
    if magic == "%%spmd":
        found = _following(spmd_parser(), before, [])
    elif magic == "%gpupool" and not before:
        found = list(COMMANDS)
    elif magic == "%gpupool" and before[0] in COMMANDS:
        parser = COMMANDS[before[0]]()
        found = _following(parser, before[1:], _plain_words(before, variables, composites))
    else:
        found = []
    return [word for word in found if word.startswith(typed)]


def register(shell: Any) -> None:
    """Have the shell ask us too."""
    unregister(shell)
    shell.Completer.custom_matchers.append(_match)


def unregister(shell: Any) -> None:
    """Have it ask no more."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != _IDENTIFIER]


def _following(parser: MagicParser, before: Sequence[str], plain: list[str]) -> list[str]:
    """The values of the option just named, else plain words and the options not yet there."""
    values = parser.values_of(before[-1]) if before else None
    if values:
        return list(values)
    if values is not None and not plain:
        return []
    return plain + [name for name in parser.option_names() if name not in before]


def _plain_words(
    before: Sequence[str], variables: Iterable[str], composites: Iterable[str]
) -> list[str]:
    if before[0] == "sync":
        return sorted(set(composites) - set(before)) if len(before) > 1 else []
    options = [word for word in before if word.startswith("-")]
    if before[0] == "env" or options[-1:] == ["--env"]:
        return sorted(set(variables) - set(before))
    if before == ["auto"]:
        return ["on", "off"]
    return list(PROFILES) if before == ["start"] else []


_IDENTIFIER = "gpupool"


def _match_words(context: CompletionContext) -> dict[str, Any]:
    line = context.text_until_cursor.lstrip()
    words = complete(line, os.environ, _composites() if "sync" in line else ())
    return {
        "completions": [SimpleCompletion(text=word, type="magic") for word in words],
        "matched_fragment": line.rpartition(" ")[2],
        "ordered": True,
        "suppress": bool(words),  # names of variables make no sense here
    }


def _composites() -> list[str]:
    return [name for name, value in list(namespace().items()) if isinstance(value, Composite)]


_match = context_matcher(identifier=_IDENTIFIER)(_match_words)
