"""Hides secret values in everything that comes back from the ranks. Runs anywhere.

A value is found in the forms in which programs print it: as it is, escaped as `repr`, JSON, HTML
and URLs do, in base64, and line by line. AWS key ids are found by their pattern, known or not, and
so are the secrets in URLs.
"""

from __future__ import annotations

import base64
import html
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus, unquote

MASK = "[hidden]"
_KEY_ID = re.compile("A(?=[KS]IA[A-Z0-9]{16})")
_KEY_ID_LENGTH = 20
_KEY_ID_BEGINS = re.compile(r"A(?:[KS](?:I(?:A[A-Z0-9]{0,15})?)?)?\Z")
_MIN_LINE_LENGTH = 16  # a shorter line of a value may be an ordinary word
_MIN_BASE64_OCTETS = 8  # of fewer, base64 has less than ten characters that are all the value's
# Before the host of a URL; with a slash in the password, which should be quoted, if no port is
# meant. All repeats that could begin anywhere are bounded, so that a long text takes no longer.
_USERINFO = re.compile(
    r"""(https?:)?//(?:([^\s/]+)|([^\s/:@"']{0,256}:(?![0-9]{1,5}/)[^\s@"']{1,256}))@""",
    re.IGNORECASE,
)
_IN_QUERY = re.compile(
    r"([?&;#][^\s?&;#=/]{0,64}?(?:secret|token|passw|key|credential|sig)[^\s?&;#=/]{0,64}=)"
    r"""([^&\s#"']+)""",
    re.IGNORECASE,
)
_WITHOUT_SCHEME = re.compile(r"[^\s/:@]+:([^\s/@]+)@[^\s/:@]+:[0-9]{1,5}/?")
_TOKEN = re.compile(r"(?=.*[0-9A-Z]).{10,}")  # and no user's name


class _Known(NamedTuple):
    """What is hidden at one moment: never changed, only replaced, so any thread may read it."""

    values: frozenset[str]
    forms: dict[str, list[str]]  # by their first character, longest first
    heads: re.Pattern[str]  # finds this character, if the second one or the text's end follows


class Secrets:
    """The values to hide of one pool. It only grows: what was hidden once stays hidden.

    Whoever masks with it (a `Redactor`, say) knows of values that are added later too.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self.known = _known_of(frozenset())
        self.add(values)

    def add(self, values: Iterable[str]) -> None:
        """Hide these values too, from now on."""
        with self._lock:
            values = self.known.values.union(value for value in values if len(value) > 1)
            if values != self.known.values:
                self.known = _known_of(values)

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
        return self._give_out(self._held + chunk, is_last=False)

    def flush(self) -> str:
        """The text that was held back, at the end of the stream."""
        return self._give_out(self._held, is_last=True)

    def _give_out(self, text: str, is_last: bool) -> str:
        found, unsure = _search(text, self._secrets.known)
        cut = len(text) if is_last else unsure
        shown: list[str] = []
        position = self._num_masked  # up to here all is shown or masked
        for start, end in found:
            if start < position:  # it overlaps the one before: both are masked as one
                position = max(position, end)
            elif start < cut:
                shown += [text[position:start], MASK]
                position = end
        shown.append(text[position:cut])
        self._held, self._num_masked = text[cut:], max(0, position - cut)
        return "".join(shown)


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
    return _IN_QUERY.sub(r"\1***", _USERINFO.sub(r"\1//***@", text))


def passwords(text: str) -> set[str]:
    """The passwords, tokens and signatures in the URLs of a text, as written and decoded.

    >>> sorted(passwords("postgres://ada:p%40ss@host/db?token=abc"))
    ['abc', 'p%40ss', 'p@ss']
    """
    found = {value for _, value in _IN_QUERY.findall(text)}
    for scheme, plain, with_slash in _USERINFO.findall(text):
        name, colon, password = (plain or with_slash).partition(":")
        if colon:
            found.add(password)
        elif scheme and _TOKEN.fullmatch(name):
            found.add(name)
    whole = _WITHOUT_SCHEME.fullmatch(text)
    found |= {whole[1]} if whole else set()
    return (found | {unquote(value) for value in found}) - {""}


def redact_all(content: Any, secrets: Secrets) -> Any:
    """The same for every text in plain data, keys and bytes too: a mime bundle, an event."""
    if isinstance(content, str):
        return redact(content, secrets)
    if isinstance(content, (bytes, bytearray)):
        text = content.decode(errors="surrogateescape")
        return type(content)(redact(text, secrets).encode(errors="surrogateescape"))
    if isinstance(content, dict):
        return {
            redact_all(key, secrets): redact_all(value, secrets) for key, value in content.items()
        }
    if isinstance(content, (list, set, frozenset)):
        return type(content)(redact_all(value, secrets) for value in content)
    if isinstance(content, tuple):  # a named one becomes a plain one
        return tuple(redact_all(value, secrets) for value in content)
    return content


def _search(text: str, known: _Known) -> tuple[list[tuple[int, int]], int]:
    """Start and end of each hidden value, and where the text's end begins that may become one."""
    found, length = list[tuple[int, int]](), len(text)
    cut = length
    for match in known.heads.finditer(text):
        start = match.start()
        for form in known.forms[match[0]]:
            end = start + len(form)
            if end > length:
                if start < cut and form.startswith(text[start:]):
                    cut = start
            elif text.startswith(form, start):
                found.append((start, end))
                break
    found += [(match.start(), match.start() + _KEY_ID_LENGTH) for match in _KEY_ID.finditer(text)]
    found.sort()
    key_id = _KEY_ID_BEGINS.search(text, max(0, length - _KEY_ID_LENGTH + 1))
    return found, min(cut, key_id.start() if key_id else cut)


def _known_of(values: frozenset[str]) -> _Known:
    forms = defaultdict[str, list[str]](list)
    for form in sorted({form for value in values for form in _forms(value)}, key=len)[::-1]:
        forms[form[0]].append(form)
    heads = [
        re.escape(first) + rf"(?=\Z|[{re.escape(''.join({form[1] for form in some}))}])"
        for first, some in forms.items()
    ]
    return _Known(values, forms, re.compile("|".join(heads) or "(?!)"))


def _forms(value: str) -> Iterator[str]:
    """The value, and each long line of it, as programs write them."""
    bare = value.strip() if len(value.strip()) > 1 else value
    yield from _in_base64(bare.encode(errors="surrogateescape"))
    for text in {bare, *map(str.strip, bare.splitlines())}:
        # "-----BEGIN PRIVATE KEY-----" is not secret
        if text == bare or (len(text) >= _MIN_LINE_LENGTH and not text.startswith("-----")):
            yield text
            octets = text.encode(errors="surrogateescape")
            # Which quotes `repr` escapes depends on those around the value: with both of them
            # behind it, it escapes '.
            for shown in (repr(text + "\"'")[1:-4], repr(octets + b"\"'")[2:-4]):
                yield from (shown, shown.replace("\\'", "'"))
            as_json = json.dumps(text)[1:-1]
            yield from (as_json, as_json.replace("/", "\\/"))  # as pandas and PHP do
            yield json.dumps(text, ensure_ascii=False)[1:-1]
            yield from (html.escape(text), html.escape(text, quote=False))
            yield from (quote(octets, safe=""), quote(octets), quote_plus(octets))


def _in_base64(octets: bytes) -> Iterator[str]:
    """Of base64 what is the value's alone: three forms, by what stands before it.

    A character holds six bits; those at the ends are partly of what stands beside the value.
    """
    for num_before in range(3 if len(octets) >= _MIN_BASE64_OCTETS else 0):
        begin, end = -(-num_before * 8 // 6), (num_before + len(octets)) * 8 // 6
        inner = base64.b64encode(b"\0" * num_before + octets).decode()[begin:end]
        yield from (inner, inner.replace("+", "-").replace("/", "_"))  # also as URLs have it
