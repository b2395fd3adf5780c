"""Hides secret values in everything that comes back from the ranks. Runs anywhere.

A value is found in the forms in which programs print it: as it is, escaped as `repr`, JSON, HTML
and URLs do. AWS key ids are found by their pattern, known or not.
"""

from __future__ import annotations

import html
import json
import re
import string
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

MASK = "[hidden]"
_KEY_ID = re.compile(r"(?=A[KS]IA[A-Z0-9]{16})")  # a lookahead, so that overlapping ones are found
_KEY_ID_CHARS = string.ascii_uppercase + string.digits
_KEY_ID_LENGTH = 20
_IN_QUERY = re.compile(
    r"([?&][^?&=\s/]*(?:secret|token|passw|key|credential|sig)[^?&=\s/]*=)[^&\s#\"']+",
    re.IGNORECASE,
)
_IN_HOST = re.compile(r"//([^/@\s]+)@")
_KEY_ID_BEGINS = re.compile(r"A(?:[KS](?:I(?:A[A-Z0-9]{0,15})?)?)?\Z")


class _Known(NamedTuple):
    """What is hidden at one moment: never changed, only replaced, so any thread may read it."""

    values: frozenset[str] = frozenset()
    forms: tuple[str, ...] = ()
    chars: frozenset[str] = frozenset(_KEY_ID_CHARS)  # a text ending otherwise begins no value


class Secrets:
    """The values to hide of one pool. It only grows: what was hidden once stays hidden.

    Whoever masks with it (a `Redactor`, say) knows of values that are added later too.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self.known = _Known()
        self.add(values)

    def add(self, values: Iterable[str]) -> None:
        """Hide these values too, from now on."""
        with self._lock:
            known = self.known
            new = set(values) - known.values - {""}
            if new:
                forms = {form for value in new for form in _forms(value)}.union(known.forms)
                chars = known.chars.union(*(form[:-1] for form in forms))
                self.known = _Known(known.values | new, tuple(sorted(forms)), chars)

    def __iter__(self) -> Iterator[str]:
        return iter(self.known.values)

    def __repr__(self) -> str:
        return f"Secrets({len(self.known.values)} values)"


class Redactor:
    """Masks hidden values in a stream of text chunks, also where one is cut by a chunk's end.

    The end of a chunk is held back while it could be the beginning of a hidden value; `flush`
    gives it out. However a text is cut, what comes out is the same.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held = ""
        self._num_masked = 0  # characters at the start of _held that a mask already stands for

    def feed(self, chunk: str) -> str:
        """What of the text so far can be shown now."""
        text = self._held + chunk
        known = self._secrets.known
        return self._give_out(text, len(text) - _unsure(text, known), known)

    def flush(self) -> str:
        """The text that was held back, at the end of the stream."""
        return self._give_out(self._held, len(self._held), self._secrets.known)

    def _give_out(self, text: str, cut: int, known: _Known) -> str:
        shown: list[str] = []
        position, num_masked = 0, 0
        for start, end in self._runs(text, known.forms):
            is_shown = start == 0 and self._num_masked > 0
            if start >= cut and not is_shown:
                break
            shown += [text[position:start], "" if is_shown else MASK]
            position, num_masked = min(end, cut), max(0, end - cut)
        shown.append(text[position:cut])
        self._held, self._num_masked = text[cut:], num_masked
        return "".join(shown)

    def _runs(self, text: str, forms: tuple[str, ...]) -> list[tuple[int, int]]:
        """Start and end of each stretch of hidden values, overlapping ones as one."""
        runs = [(0, self._num_masked)] if self._num_masked else []
        for start, end in _occurrences(text, forms):
            if runs and start < runs[-1][1]:
                runs[-1] = runs[-1][0], max(end, runs[-1][1])
            else:
                runs.append((start, end))
        return runs


def redact(text: str, secrets: Secrets) -> str:
    """`text` with every occurrence of a hidden value replaced by a mask.

    Values that overlap in the text are masked as one, so that no piece of either is left.
    """
    redactor = Redactor(secrets)
    return redactor.feed(text) + redactor.flush()


def without_passwords(text: str) -> str:
    """`text` without the passwords before the host of a URL, and the signatures after its "?".

    >>> without_passwords("s3://me:secret@bucket/run?X-Amz-Signature=abc")
    's3://***@bucket/run?X-Amz-Signature=***'
    """
    return _IN_QUERY.sub(r"\1***", _IN_HOST.sub("//***@", text))


def passwords(url: str) -> set[str]:
    """What `without_passwords` takes out of a URL before its host, as it may be quoted elsewhere.

    >>> sorted(passwords("s3://me:secret@bucket/run"))
    ['me:secret', 'secret']
    """
    inner = _IN_HOST.findall(url)
    return {part for one in inner if ":" in one for part in (one, one.partition(":")[2])} - {""}


def uncut(text: str, position: int, secrets: Secrets) -> int:
    """The first position from this one on that lies in no hidden value: the text may be cut there.

    Who masks the parts later would not find half a value.
    """
    forms = secrets.known.forms
    longest = max([_KEY_ID_LENGTH, *map(len, forms)])
    while True:
        start = max(0, position - longest)
        window = text[start : position + longest]
        cut = [end for begin, end in _occurrences(window, forms) if begin < position - start < end]
        if not cut:
            return position
        position = start + max(cut)


def redact_all(content: Any, secrets: Secrets) -> Any:
    """The same for every text in plain data: a mime bundle, an event."""
    if isinstance(content, str):
        return redact(content, secrets)
    if isinstance(content, dict):
        return {key: redact_all(value, secrets) for key, value in content.items()}
    if isinstance(content, list):
        return [redact_all(value, secrets) for value in content]
    return content


def _forms(value: str) -> set[str]:
    """The value as programs write it."""
    octets = value.encode(errors="surrogateescape")
    return {
        value,
        *_escaped(repr(value + "\"'")),
        *_escaped(ascii(value + "\"'")),
        *_escaped(repr(octets + b"\"'")[1:]),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        html.escape(value),
        html.escape(value, quote=False),
        quote(value, errors="surrogateescape"),
        quote(value, safe="", errors="surrogateescape"),
        quote_plus(value, errors="surrogateescape"),
    }


def _escaped(shown: str) -> set[str]:
    """Both forms of a `repr` that ends in the two quotes: which is escaped depends on the other."""
    inside = shown[1:-4]  # between the quotes, without the two at the end, one of them escaped
    return {inside, inside.replace("\\'", "'")}


def _occurrences(text: str, forms: tuple[str, ...]) -> list[tuple[int, int]]:
    """Start and end of each hidden value in a text, in order of the start.

    One quick search per form: on long texts that is many times faster than one pattern for all.
    """
    found = []
    for form in forms:
        start = text.find(form)
        while start >= 0:
            found.append((start, start + len(form)))
            start = text.find(form, start + 1)
    if "AKIA" in text or "ASIA" in text:
        starts = (match.start() for match in _KEY_ID.finditer(text))
        found += [(start, start + _KEY_ID_LENGTH) for start in starts]
    found.sort()
    return found


def _unsure(text: str, known: _Known) -> int:
    """Length of the longest end of `text` that a hidden value could begin with."""
    if not text or text[-1] not in known.chars:  # most texts end in a line break
        return 0
    key_id = _KEY_ID_BEGINS.search(text, max(0, len(text) - _KEY_ID_LENGTH + 1))
    longest = len(key_id.group()) if key_id else 0
    return max([longest, *(_overlap(text, form) for form in known.forms)])


def _overlap(text: str, value: str) -> int:
    """Length of the longest proper beginning of `value` that ends `text`."""
    start = max(0, len(text) - len(value) + 1)
    while (start := text.find(value[0], start)) >= 0:
        if value.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
