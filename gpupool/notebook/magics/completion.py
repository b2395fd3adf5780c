"""Tab completion of %gpupool, %%spmd and their options. Runs on the client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from gpupool.core.options.pool_options import PROFILES
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser
from gpupool.notebook.magics.parser import MagicParser
from gpupool.pool import session

Words = Mapping[str, Callable[[], Iterable[str]]]
"""What makes the words that an argument may have, by the argument's `dest`."""

_NUM_RANKS = 32  # of a larger pool the others are left to be typed


def complete(line: str, words: Words) -> list[str]:
    """The words that may stand at the end of `line`, in place of its last word; [] elsewhere.

    >>> complete("%gpupool st", {})
    ['status', 'start', 'stop']
    >>> complete("%%spmd --view ", {})
    ['auto', 'quiet']
    """
    magic, *typed = line.split(" ")
    before = [word for word in typed[:-1] if word]
    if not typed:
        found: list[str] = []
    elif magic == "%%spmd":
        found = _following(spmd_parser(), before, words)
    elif magic == "%gpupool" and not before:
        found = list(COMMANDS)
    elif magic == "%gpupool" and before[0] in COMMANDS:
        found = _following(COMMANDS[before[0]](), before[1:], words)
    else:
        found = []
    return [word for word in found if word.startswith(typed[-1])]


def register(shell: Any) -> None:
    """Have the shell ask us too."""
    unregister(shell)
    shell.Completer.custom_matchers.append(_match)


def unregister(shell: Any) -> None:
    """Have it ask no more."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [
        match for match in matchers if getattr(match, "matcher_identifier", "") != _IDENTIFIER
    ]


def _following(parser: MagicParser, before: Sequence[str], words: Words) -> list[str]:
    """The values that may come next, and the options not yet there."""
    actions, may_be_option = parser.expected_after(before)
    values: list[str] = []
    for action in actions:
        made = action.choices or words.get(action.dest, tuple)()
        is_list = action.nargs in ("*", "+")  # in which nothing stands twice
        values += [str(word) for word in made if not (is_list and word in before)]
    options = parser.option_names() if may_be_option else []
    return values + [name for name in options if name not in before]


def _environment() -> list[str]:
    return sorted(os.environ)


def _ranks() -> list[str]:
    pool = session.find()
    return list(map(str, range(min(pool.world_size, _NUM_RANKS)))) if pool is not None else []


_WORDS: Words = {
    "profile": lambda: PROFILES,
    "env": _environment,
    "names": _environment,
    "rank": _ranks,
    "ranks": lambda: ["all", *_ranks()],
}

_IDENTIFIER = "gpupool"


def _match_words(context: CompletionContext) -> dict[str, Any]:
    line = context.text_until_cursor.lstrip()
    words = complete(line, _WORDS)
    return {
        "completions": [SimpleCompletion(text=word, type="magic") for word in words],
        "matched_fragment": line.rpartition(" ")[2],
        "ordered": True,
        "suppress": bool(words),  # names of variables make no sense here
    }


_match = context_matcher(identifier=_IDENTIFIER)(_match_words)
