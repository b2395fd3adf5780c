"""Tab completion of %gpupool, %%spmd and their options. Runs on the client."""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser
from collections.abc import Iterable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from gpupool.core.options.pool_options import PROFILES
from gpupool.notebook.magics.arguments import COMMANDS, GPUPOOL, SPMD


def complete(line: str) -> list[str]:
    """The words that may stand at the end of `line`, in place of its last word; [] elsewhere.

    >>> complete("%gpupool st")
    ['status', 'start', 'stop']
    >>> complete("%%spmd --view ")
    ['auto', 'quiet']
    """
    magic, *typed = line.split(" ")
    parser: ArgumentParser | None = {GPUPOOL.prog: GPUPOOL, SPMD.prog: SPMD}.get(magic)
    if parser is GPUPOOL and len(typed) > 1:
        parser = COMMANDS.get(typed[0])
    if parser is None or not typed:
        return []
    options = {name: action for action in parser._actions for name in action.option_strings}
    last = options.get(typed[-2]) if len(typed) > 1 else None
    if last is not None and last.nargs != 0:  # an option that takes a value
        found = _values(last)
    else:
        plain = [action for action in parser._actions if not action.option_strings]
        found = [*(word for action in plain for word in _values(action)), *options]
    return [word for word in found if word.startswith(typed[-1]) and word not in typed[:-1]]


def _values(action: Action) -> Iterable[str]:
    if action.dest in ("env", "names"):
        return sorted(os.environ)
    return PROFILES if action.dest == "profile" else action.choices or ()


def register(shell: Any) -> None:
    """Have the shell ask us too, once."""
    if _match not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_match)


def _match_words(context: CompletionContext) -> dict[str, Any]:
    line = context.text_until_cursor.lstrip()
    words = complete(line)
    return {
        "completions": [SimpleCompletion(text=word, type="magic") for word in words],
        "matched_fragment": line.rpartition(" ")[2],
        "ordered": True,
        "suppress": bool(words),  # names of variables make no sense here
    }


_match = context_matcher(identifier="gpupool")(_match_words)
