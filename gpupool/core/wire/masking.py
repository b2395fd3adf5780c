"""Hides secret values in everything that comes back from the ranks. Runs anywhere.

A value is found in the forms in which programs print it: as it is, escaped as `repr`, JSON, HTML
and URLs do, in base64, and line by line.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

MASK = "[hidden]"
_MIN_LINE_LENGTH = 16  # a shorter line of a value may be an ordinary word
_MIN_BASE64_OCTETS = 8  # of fewer, base64 has less than ten characters that are all the value's


class Secrets:
    """The values to hide of one pool. It only grows, also while other threads mask with it."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: set[str] = set()
        self.add(values)

    def add(self, values: Iterable[str]) -> None:
        self._values.update(value for value in values if len(value) > 1)
        forms = defaultdict[str, list[str]](list)
        for form in sorted({form for one in self._values for form in _forms(one)}, key=len)[::-1]:
            forms[form[0]].append(form)
        heads = [
            f"{re.escape(first)}(?=\\Z|[{re.escape(''.join({form[1] for form in some}))}])"
            for first, some in forms.items()
        ]
        self.forms = forms  # by their first character, longest first; before what leads there
        # finds this character, if the second one or the text's end follows
        self.heads = re.compile("|".join(heads) or "(?!)")


class Redactor:
    """Masks hidden values in a stream of text chunks, also where one is cut by a chunk's end.

    The end of a chunk is held back while it could be the beginning of a hidden value. However a
    text is cut, what comes out is the same.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held = ""
        self._num_masked = 0  # characters at the start of _held that a mask already stands for

    def feed(self, chunk: str, *, is_last: bool = False) -> str:
        """What of the text so far can be shown now; all of it after the last chunk."""
        text = self._held + chunk
        found, unsure = _search(text, self._secrets)
        end = len(text) if is_last else unsure
        shown: list[str] = []
        position = self._num_masked  # up to here all is shown or masked
        for start, stop in found:
            if start < position:  # it overlaps the one before: both are masked as one
                position = max(position, stop)
            elif start < end:
                shown += [text[position:start], MASK]
                position = stop
        shown.append(text[position:end])
        self._held, self._num_masked = text[end:], max(0, position - end)
        return "".join(shown)


def redact(text: str, secrets: Secrets) -> str:
    """`text` with hidden values masked; those that overlap as one, so that no piece is left."""
    return Redactor(secrets).feed(text, is_last=True)


def redact_all(content: Any, secrets: Secrets) -> Any:
    """The same for every text in plain data, keys too: a mime bundle, an event."""
    if isinstance(content, str):
        return redact(content, secrets)
    if isinstance(content, dict):
        return {redact_all(k, secrets): redact_all(v, secrets) for k, v in content.items()}
    if isinstance(content, list):
        return [redact_all(value, secrets) for value in content]
    if isinstance(content, tuple):  # a named one becomes a plain one
        return tuple(redact_all(value, secrets) for value in content)
    return content


def _search(text: str, secrets: Secrets) -> tuple[list[tuple[int, int]], int]:
    """Start and end of each hidden value, and where the text's end begins that may become one."""
    found, length = list[tuple[int, int]](), len(text)
    unsure = length
    for match in secrets.heads.finditer(text):
        start = match.start()
        for form in secrets.forms[match[0]]:
            if text.startswith(form, start):
                found.append((start, start + len(form)))
                break
            if start < unsure and len(form) > length - start and form.startswith(text[start:]):
                unsure = start
    return found, unsure


def _forms(value: str) -> Iterator[str]:
    """The value, and each long line of it, as programs write them."""
    bare = value.strip() if len(value.strip()) > 1 else value
    yield from _in_base64(bare.encode(errors="surrogateescape"))
    for text in {bare, *map(str.strip, bare.splitlines())}:
        # "-----BEGIN PRIVATE KEY-----" is not secret
        if text == bare or (len(text) >= _MIN_LINE_LENGTH and not text.startswith("-----")):
            as_json = json.dumps(text)[1:-1]
            octets = text.encode(errors="surrogateescape")
            yield from (text, repr(text)[1:-1], repr(octets)[2:-1], html.escape(text))
            yield from (as_json, as_json.replace("/", "\\/"))  # as pandas and PHP do
            yield from (quote(octets, safe=""), quote(octets))


def _in_base64(octets: bytes) -> Iterator[str]:
    """Of base64 what is the value's alone: three forms, by what stands before it.

    A character holds six bits; those at the ends are partly of what stands beside the value.
    """
    for num_before in range(3 if len(octets) >= _MIN_BASE64_OCTETS else 0):
        begin, end = -(-num_before * 8 // 6), (num_before + len(octets)) * 8 // 6
        inner = base64.b64encode(b"\0" * num_before + octets).decode()[begin:end]
        yield from (inner, inner.replace("+", "-").replace("/", "_"))  # also as URLs have it
