"""Writes docs/reference/training-options.md from the docstrings of the options.

python -m demo.options_page
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

from gpupool import CallbackInfo, TrainingOptions
from gpupool.core.options import fields as source

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "training-options.md"
_HEAD = """\
# Options of a training

Written by `python -m demo.options_page` from `gpupool/core/options/fields.py`. Each is a keyword of
`gpupool.train` and a field of `gpupool.TrainingOptions`:

```py
gpupool.train(network, data, epochs=3, lr=0.1)
options = gpupool.TrainingOptions(epochs=3, lr=0.1)
gpupool.train(network, data, options=options, lr=0.2)  # beside `options` a keyword replaces one
```

`options.explain(network, data)` shows what they come to. A name that is no option, and an option
that would do nothing, are answered with what was meant. [docs/training.md](../training.md) has
MATLAB's names.
"""
_CALLBACKS = """\
## What a callback gets

Each function in `callbacks` is called on every rank with a `gpupool.CallbackInfo`.

"""


def text() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(), f"{_CALLBACKS}{_docstring(CallbackInfo)}\n"])


def _sections() -> list[str]:
    """The options under the headings that divide the class, each with its default and meaning."""
    code = inspect.getsource(source.TrainingFields)
    lines = code.splitlines()
    (class_,) = ast.parse(code).body
    assert isinstance(class_, ast.ClassDef)
    headings = {
        number: found[1]
        for number, line in enumerate(lines, 1)
        if (found := re.fullmatch(r" *# ---- (.*)", line))
    }
    defaults = {one.name: _default(one) for one in fields(TrainingOptions)}
    parts: list[str] = []
    for field, words in zip(class_.body, class_.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        assert isinstance(words, ast.Expr), f"{field.target.id} has no docstring"
        assert isinstance(words.value, ast.Constant)
        for number in [number for number in headings if number < field.lineno]:
            heading = headings.pop(number)
            parts.append(f"## {heading[0].upper()}{heading[1:]}\n")
        name = field.target.id
        meaning = inspect.cleandoc(str(words.value.value))
        parts.append(f"**`{name}`** = `{defaults[name]}`\n\n{meaning}\n")
    return parts


def _default(one: object) -> str:
    default = getattr(one, "default", MISSING)
    return "{}" if default is MISSING else repr(default)


def _docstring(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text())
