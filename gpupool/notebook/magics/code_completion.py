"""Tab completion in code: words of options, and what only the ranks have. Runs on the client.

IPython and Jedi know names of parameters by themselves; they know neither which texts a parameter
takes, nor what a name means on the ranks.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion

from gpupool.core.options.option_help import Annotation
from gpupool.notebook.magics import auto
from gpupool.pool import session

# a parameter, and how much of its value is there: a quote and what follows it, or nothing yet
_VALUE = re.compile(r"""(\w+)\s*=\s*(?:(?P<quote>["'])(?P<typed>[^"'\n]*))?$""")
_TEXTS = re.compile(
    r'''"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*'''
)
_CALLED = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\s*$")
_NAME = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*)([A-Za-z_]\w*)?$")
_CELL = re.compile(r"\s*%%spmd\b[^\n]*\n")
RANK_NAMES = ("rank", "world_size", "local_rank", "device", "torch", "dist")
"""What every cell has: see `engine/entry.py`."""


def option_values(text: str, names: Mapping[str, Any]) -> tuple[list[str], str]:
    """The words that the option at the end of `text` takes, and how much of one is there already.

    `names` are those of the notebook. Without a quote the words come in quotes.

    >>> import gpupool
    >>> option_values("gpupool.TrainingOptions(lr=0.1, shuffle='ne", {"gpupool": gpupool})
    (['never'], 'ne')
    >>> option_values("gpupool.start(backend=", {"gpupool": gpupool})
    (['"auto"', '"nccl"', '"gloo"'], '')
    """
    found = _VALUE.search(text)
    if found is None:
        return [], ""
    function = _open_call(text[: found.start()], names)
    if function is None:
        return [], ""
    words = _words(function, found[1])
    if found["quote"] is None:
        return [f'"{word}"' for word in words], ""
    return [word for word in words if word.startswith(found["typed"])], found["typed"]


def rank_names(text: str, names: Mapping[str, Any]) -> tuple[list[str], str]:
    """The names, or attributes of a name, that only ranks have, which `text` may end in.

    Only a pool that is idle is asked for attributes.
    """
    found = _NAME.search(text)
    if found is None or not (found[1] or found[2]):
        return [], ""
    (path, typed), pool = (found[1].split(".")[:-1], found[2] or ""), session.find()
    if path and (pool is None or path[0] in names):  # the notebook's own is completed by others
        return [], ""
    if not path:
        known = pool.variables.imports.names() if pool is not None else ()
        offered = [name for name in (*RANK_NAMES, *known) if name not in names]
    else:
        assert pool is not None
        offered = pool.variables.remote.attributes(path[0], tuple(path[1:]))
    return sorted({name for name in offered if name.startswith(typed)}), typed


def match_values(context: CompletionContext, shell: Any) -> dict[str, Any]:
    """What IPython is to offer inside a call of ours."""
    return _matches(*option_values(_until_cursor(context), shell.user_ns), "param", True)


def match_rank_names(context: CompletionContext, shell: Any) -> dict[str, Any]:
    """What IPython is to offer in a cell of the ranks, beside what the notebook has."""
    text = _until_cursor(context)
    cell = _CELL.match(text)
    if cell is None and not (auto.of(shell).is_on and not auto.stays_here(text, shell)):
        return _matches([], "", "", False)
    code = text[cell.end() :] if cell else text
    return _matches(*rank_names(code, shell.user_ns), "instance", False)


def _matches(words: Sequence[str], typed: str, kind: str, alone: bool) -> dict[str, Any]:
    return {
        "completions": [SimpleCompletion(text=word, type=kind) for word in words],
        "matched_fragment": typed,
        "ordered": True,
        "suppress": alone and bool(words),  # neither files nor variables make sense there
    }


def _until_cursor(context: CompletionContext) -> str:
    """All of the cell before the cursor."""
    before = context.full_text.split("\n")[: context.cursor_line]
    return "\n".join([*before, context.text_until_cursor])


def _open_call(text: str, names: Mapping[str, Any]) -> Any:
    """The function of ours whose brackets are open at the end of `text`; None if there is none."""
    bare = _TEXTS.sub("0", text)
    depth = 0
    for position in range(len(bare) - 1, -1, -1):
        if bare[position] in ")]}":
            depth += 1
        elif bare[position] in "([{":
            depth -= 1
        if depth < 0:
            called = _CALLED.search(bare[:position]) if bare[position] == "(" else None
            return _meant(called[1], names) if called else None
    return None


def _meant(dotted: str, names: Mapping[str, Any]) -> Any:
    """The function of gpupool that a name in the notebook means."""
    import gpupool

    first, *rest = dotted.split(".")
    if first not in names:  # the cell that imports it may be this one
        name = dotted.removeprefix("gpupool.")
        return getattr(gpupool, name) if name in gpupool.__all__ else None
    value = names[first]
    for name in rest:
        # Of a module alone: an attribute of anything else may run code of the user's.
        value = getattr(value, name, None) if isinstance(value, ModuleType) else None
    is_ours = str(getattr(value, "__module__", "")).partition(".")[0] == "gpupool"
    return value if is_ours and callable(value) else None


def _words(function: Any, name: str) -> tuple[str, ...]:
    """The words that a parameter of a function of ours takes."""
    if keyword.iskeyword(name):
        return ()
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    # `predict` and the like pass some of the options of a training on.
    if name not in parameters and not any(
        one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    ):
        return ()
    annotation = parameters[name].annotation if name in parameters else None
    if isinstance(annotation, Annotation):
        return annotation.words
    from gpupool import TrainingOptions

    option = inspect.signature(TrainingOptions).parameters.get(name)
    return () if option is None else option.annotation.words
