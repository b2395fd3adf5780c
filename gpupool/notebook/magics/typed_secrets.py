"""Refuse a secret that is typed behind a magic. Runs on the client."""

from __future__ import annotations

import re

from gpupool.core.errors import OptionsError

_TYPED = re.compile(r"""(?<!\S)["']?([A-Za-z_]\w*)\s?=\s*["']?[^\s"']""")


def refuse_typed_value(line: str) -> None:
    """Raise an error if NAME=value stands on a magic's line.

    Raises:
        OptionsError: it does. The value is not repeated.
    """
    typed = _TYPED.search(line)
    if typed is None:
        return
    name = typed[1]
    raise OptionsError(
        f"{name}=...: name the variable only, its value is taken from the notebook's environment: "
        f'os.environ["{name}"] = getpass.getpass() asks for it and keeps it nowhere else. '
        "The typed value is still in this cell and in IPython's history: delete it there, or "
        "replace the secret."
    )
