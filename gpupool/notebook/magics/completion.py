"""Tab completion of %gpupool, %%spmd and their options. Runs on the client."""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from gpupool.core.options.pool_options import PROFILES
from gpupool.notebook.magics.arguments import GPUPOOL, SPMD
from gpupool.pool import session

Words = Mapping[str, Callable[[], Iterable[str]]]
"""What makes the words that an argument may have, by the argument's `dest`."""


def complete(line: str, words: Words) -> list[str]:
    """The words that may stand at the end of `line`, in place of its last word; [] elsewhere.

    >>> complete("%gpupool st", {})
    ['status', 'start', 'stop']
    >>> complete("%%spmd --view ", {})
    ['auto', 'quiet']
    """
    magic, *typed = line.split(" ")
    parser = {GPUPOOL.prog: GPUPOOL, SPMD.prog: SPMD}.get(magic)
    if parser is None or not typed:
        return []
    found = _following(parser, [word for word in typed[:-1] if word], words)
    return [word for word in found if word.startswith(typed[-1])]


def _following(parser: ArgumentParser, before: Sequence[str], words: Words) -> list[str]:
    """The values of the argument whose turn it is, and the options not yet there."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    plain = [action for action in parser._actions if not action.option_strings]
    open_: Action | None = None  # an option that takes more values
    for number, word in enumerate(before, 1):
        if word in options:
            open_ = options[word] if options[word].nargs != 0 else None
        elif open_ is not None:
            open_ = open_ if open_.nargs == "+" else None
        elif plain and isinstance(commands := plain[0].choices, dict):
            rest = before[number:]
            return _following(commands[word], rest, words) if word in commands else []
        elif plain and plain[0].nargs not in ("*", "+"):
            plain.pop(0)
    values: list[str] = []
    for action in plain[:1] if open_ is None else [open_]:
        made = action.choices or words.get(action.dest, tuple)()
        is_list = action.nargs in ("*", "+")  # in which nothing stands twice
        values += [str(word) for word in made if not (is_list and word in before)]
    if open_ is None or (open_.nargs == "+" and before[-1] not in options):
        values += [name for name in options if name not in before]
    return values


def register(shell: Any) -> None:
    """Have the shell ask us too, once."""
    if _match not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_match)


def _environment() -> list[str]:
    return sorted(os.environ)


def _ranks() -> list[str]:
    pool = session.find()
    return list(map(str, range(pool.world_size))) if pool is not None else []


_WORDS: Words = {
    "profile": lambda: PROFILES,
    "env": _environment,
    "names": _environment,
    "rank": _ranks,
    "ranks": lambda: ["all", *_ranks()],
}


def _match_words(context: CompletionContext) -> dict[str, Any]:
    line = context.text_until_cursor.lstrip()
    words = complete(line, _WORDS)
    return {
        "completions": [SimpleCompletion(text=word, type="magic") for word in words],
        "matched_fragment": line.rpartition(" ")[2],
        "ordered": True,
        "suppress": bool(words),  # names of variables make no sense here
    }


_match = context_matcher(identifier="gpupool")(_match_words)
