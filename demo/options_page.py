"""Writes docs/reference/training-options.md from the docstrings of the options.

python -m demo.options_page
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from gpupool import CallbackInfo, TrainingOptions

_OPTION = re.compile(r"(?m)^(\w.*):$|^  (\w+) = (.+)\n((?:    .*\n)+)")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "training-options.md"
_HEAD = """\
# Options of a training

Written by `python -m demo.options_page` from `gpupool/core/options/training_options.py`. Each is a
keyword of `gpupool.train` and a field of `gpupool.TrainingOptions`:

```py
gpupool.train(network, data, epochs=3, lr=0.1)
options = gpupool.TrainingOptions(epochs=3, lr=0.1)
gpupool.train(network, data, options=options, lr=0.2)  # beside `options` a keyword replaces one
```

A name that is no option, and an option that would do nothing, are answered with what was meant.
[Coming from](../guides/coming-from.md) has the names that other libraries have for them.
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
    parts: list[str] = []
    for heading, name, default, meaning in _OPTION.findall(f"{TrainingOptions.__doc__}\n"):
        about = f"**`{name}`** = `{default}`\n\n{inspect.cleandoc(meaning)}\n"
        parts.append(f"## {heading}\n" if heading else about)
    return parts


def _docstring(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text())
