"""Which environment variables travel to the ranks, and how their values stay hidden. Runs anywhere.

Values leave the notebook only over the signed channel to the engines. What is shown is a name and a
fingerprint; what comes back from the ranks has the secret values masked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from gpupool.core.errors import OptionsError

MASK = "[hidden]"
_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|AUTH|SIGNATURE", re.IGNORECASE)
_MIN_SECRET_LENGTH = 6  # masking a shorter text would hit ordinary words
# Fingerprints are keyed afresh in every process: equal values look equal within a session, and
# nobody can test guesses against a saved notebook.
_SALT = secrets.token_bytes(16)


def select(
    patterns: Iterable[str], environ: Mapping[str, str], *, strict: bool = True
) -> dict[str, str]:
    """The variables of `environ` whose names match one of the names or globs.

    Args:
        strict: whether a plain name must be there.

    Raises:
        OptionsError: a pattern that holds a value (NAME=value), or a plain name that is not set.
    """
    chosen: dict[str, str] = {}
    for pattern in patterns:
        if "=" in pattern:
            name = pattern.split("=", 1)[0]
            raise OptionsError(
                f"{name}=...: name the variable only, its value is taken from the notebook's "
                f"environment. A value typed into a cell stays in the notebook and its history."
            )
        found = {k: v for k, v in environ.items() if fnmatchcase(k, pattern)}
        if strict and not found and not any(c in pattern for c in "*?["):
            raise OptionsError(f"{pattern} is not set in the notebook's environment.")
        chosen.update(found)
    return dict(sorted(chosen.items()))


def apply(variables: Mapping[str, str], unset: Iterable[str] = ()) -> None:
    """Set `variables` in this process and remove the names in `unset`."""
    for name in unset:
        os.environ.pop(name, None)
    os.environ.update(variables)


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that processes of a pool are started with: nothing named like a secret.

    A process's first environment can be read in /proc for as long as it lives; secrets go to the
    engines later, over the signed channel, and only those that were asked for.
    """
    return {k: v for k, v in environ.items() if not _SECRET_NAME.search(k)}


def fingerprint(value: str) -> str:
    """Six hex digits that tell two values apart and nothing about either.

    >>> fingerprint("x") == fingerprint("x"), fingerprint("x") == fingerprint("y")
    (True, False)
    """
    return hmac.new(_SALT, value.encode(), hashlib.sha256).hexdigest()[:6]


def secret_values(variables: Mapping[str, str]) -> frozenset[str]:
    """The values to mask: those of variables that are named like a secret, also as `repr` shows."""
    values = {
        value
        for name, value in variables.items()
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH
    }
    return frozenset(values | {repr(value)[1:-1] for value in values})


def redact(text: str, hidden: Iterable[str]) -> str:
    """`text` with every occurrence of a hidden value replaced by a mask.

    Values that overlap in the text are masked as one, so that no piece of either is left.
    """
    redactor = Redactor(hidden)
    return redactor.feed(text) + redactor.flush()


class Redactor:
    """Masks hidden values in a stream of text chunks, also where one is cut by a chunk's end.

    The end of a chunk is held back while it could be the beginning of a hidden value; `flush`
    gives it out. However a text is cut, what comes out is the same.
    """

    def __init__(self, hidden: Iterable[str]) -> None:
        self._hidden = sorted(filter(None, hidden), key=len, reverse=True)
        # A lookahead finds a value at every position, also inside another one; longest first.
        self._pattern = re.compile(f"(?=({'|'.join(map(re.escape, self._hidden))}))")
        self._held = ""
        self._num_masked = 0  # characters at the start of _held that a mask already stands for

    def feed(self, chunk: str) -> str:
        """What of the text so far can be shown now."""
        text = self._held + chunk
        return self._give_out(text, len(text) - self._unsure(text))

    def flush(self) -> str:
        """The text that was held back, at the end of the stream."""
        return self._give_out(self._held, len(self._held))

    def _give_out(self, text: str, cut: int) -> str:
        shown, position, num_masked = "", 0, 0
        for start, end in self._runs(text):
            is_shown = start == 0 and self._num_masked > 0
            if start >= cut and not is_shown:
                break
            shown += text[position:start] + ("" if is_shown else MASK)
            position, num_masked = min(end, cut), max(0, end - cut)
        shown += text[position:cut]
        self._held, self._num_masked = text[cut:], num_masked
        return shown

    def _runs(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each stretch of hidden values, overlapping ones as one."""
        runs = [(0, self._num_masked)] if self._num_masked else []
        if any(value in text for value in self._hidden):  # quick, and seldom so
            for match in self._pattern.finditer(text):
                start, end = match.span(1)
                if runs and start < runs[-1][1]:
                    runs[-1] = runs[-1][0], max(end, runs[-1][1])
                else:
                    runs.append((start, end))
        return runs

    def _unsure(self, text: str) -> int:
        """Length of the longest end of `text` that a hidden value could begin with."""
        return max((_overlap(text, value) for value in self._hidden), default=0)


def _overlap(text: str, value: str) -> int:
    """Length of the longest proper beginning of `value` that ends `text`."""
    start = max(0, len(text) - len(value) + 1)
    while (start := text.find(value[0], start)) >= 0:
        if value.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
