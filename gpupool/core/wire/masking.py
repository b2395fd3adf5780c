"""Hides secret values in everything that comes back from the ranks. Runs anywhere.

A value is found in the forms in which programs print it: as it is, escaped as `repr`, JSON, HTML
and URLs do, in base64, line by line, and with codes for colours in it. AWS key ids are found by
their pattern, known or not, and so are the secrets in URLs.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import re
import string
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus, unquote

from gpupool.core.terminal import CODES, MAX_CODE_CHARS

MASK = "[hidden]"
_KEY_ID = re.compile(r"A[KS]IA[A-Z0-9]{16}")
_KEY_ID_LENGTH = 20
_KEY_ID_BEGINS = re.compile(r"A(?:[KS](?:I(?:A[A-Z0-9]{0,15})?)?)?\Z")
_KEY_ID_CHARS = frozenset(string.ascii_uppercase + string.digits)
_MIN_LINE_LENGTH = 16  # a shorter line of a value may be an ordinary word
_MIN_BASE64_OCTETS = 8  # of fewer, base64 has less than ten characters that are all the value's
_MIN_ANCHOR_LENGTH = 6  # to look for a shorter one takes longer than to look for each form
_WORDS = re.compile(r"[A-Za-z0-9]+")
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
# What joins the text on both sides of it when it is shown: a code, a character that is erased,
# and NUL, which UTF-16 has in every other place.
_UNSEEN = re.compile(rf"{CODES.pattern}|\0|[^\n\x08\x1b]\x08")
_CUT_CODE = re.compile(rf"\x1b(?:\[[0-9;?]*|\][^\x07\x1b]{{0,{MAX_CODE_CHARS}}}\x1b?)?\Z")


class _Known(NamedTuple):
    """What is hidden at one moment: never changed, only replaced, so any thread may read it.

    `forms` has them by their anchor, a part that they have in common: one search shows that none
    of them is there. `endings` has the forms by the last two characters of each beginning of
    theirs, those that begin with one character by that; each character of a beginning is there.
    """

    values: frozenset[str] = frozenset()
    forms: Mapping[str, frozenset[str]] = {}
    endings: Mapping[str, frozenset[str]] = dict.fromkeys(_KEY_ID_CHARS, frozenset[str]())
    max_length: int = _KEY_ID_LENGTH


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
                self.known = _with(known, new)

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
        text, known = self._held + chunk, self._secrets.known
        bare = _bare(text)
        num_unsure = _num_unsure(text, bare, known)
        if not (num_unsure or self._num_masked or _may_be_in(text, bare, known)):
            self._held = ""  # as nearly always, and every print comes here
            return text
        return self._give_out(text, bare, len(text) - num_unsure, known)

    def flush(self) -> str:
        """The text that was held back, at the end of the stream."""
        text = self._held
        return self._give_out(text, _bare(text), len(text), self._secrets.known)

    def _give_out(self, text: str, bare: _Bare | None, cut: int, known: _Known) -> str:
        shown: list[str] = []
        position, num_masked = 0, 0
        for start, end in self._runs(text, bare, known):
            is_shown = start == 0 and self._num_masked > 0
            if start >= cut and not is_shown:
                break
            shown += [text[position:start], "" if is_shown else MASK]
            position, num_masked = min(end, cut), max(0, end - cut)
        shown.append(text[position:cut])
        self._held, self._num_masked = text[cut:], num_masked
        return "".join(shown)

    def _runs(self, text: str, bare: _Bare | None, known: _Known) -> list[tuple[int, int]]:
        """Start and end of each stretch of hidden values, overlapping ones as one."""
        runs = [(0, self._num_masked)] if self._num_masked else []
        for start, end in _occurrences(text, bare, known):
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


def uncut(text: str, position: int, secrets: Secrets) -> int:
    """The first position from this one on that lies in no hidden value: the text may be cut there.

    Who masks the parts later would not find half a value.
    """
    known = secrets.known
    while True:
        start = max(0, position - known.max_length)
        window = text[start : position + known.max_length]
        found = _occurrences(window, _bare(window), known)
        cut = [end for begin, end in found if begin < position - start < end]
        if not cut:
            return position
        position = start + max(cut)


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


class _Bare:
    """A text as it looks without codes and erased characters: what stood around them is joined."""

    def __init__(self, raw: str) -> None:
        self._raw = raw
        # the codes alone are found ten times faster
        self._unseen = _UNSEEN if "\b" in raw or "\0" in raw else CODES
        self._cut = _CUT_CODE.search(raw, max(0, len(raw) - MAX_CODE_CHARS))
        self.num_cut = len(raw) - self._cut.start() if self._cut else 0
        self.text = self._unseen.sub("", raw[: len(raw) - self.num_cut])

    @functools.cached_property
    def _left_out(self) -> tuple[list[int], list[int]]:
        """The places in `text` where something is left out, and how much up to each of them."""
        places, totals = list[int](), [0]
        for match in self._unseen.finditer(self._raw, 0, len(self._raw) - self.num_cut):
            places.append(match.start() - totals[-1])
            totals.append(totals[-1] + len(match[0]))
        return places, totals

    def in_raw(self, position: int) -> int:
        """Where the character of `text` is in the raw one."""
        places, totals = self._left_out
        return position + totals[bisect_right(places, position)]


def _bare(text: str) -> _Bare | None:
    return _Bare(text) if "\x1b" in text or "\b" in text or "\0" in text else None


def _may_be_in(text: str, bare: _Bare | None, known: _Known) -> bool:
    """Whether a hidden value can be in a text: a part of one is."""
    if any(map(text.__contains__, known.forms)) or ("A" in text and _KEY_ID.search(text)):
        return True
    return bare is not None and _may_be_in(bare.text, None, known)


def _occurrences(text: str, bare: _Bare | None, known: _Known) -> list[tuple[int, int]]:
    """Start and end of each hidden value in a text (of the same that overlap, of all together).

    In order of the start. One quick search per anchor: on long texts that is many times faster
    than one pattern for all.
    """
    found = []
    for anchor, forms in known.forms.items():
        for form in forms if anchor in text else ():
            start = text.find(form)
            while start >= 0:
                end, following = start + len(form), text.find(form, start + 1)
                while 0 <= following < end:  # of "aaaa" in many letters a there are many
                    end, following = following + len(form), text.find(form, following + 1)
                found.append((start, end))
                start = following
    key_id = _KEY_ID.search(text)
    while key_id:
        found.append(key_id.span())
        key_id = _KEY_ID.search(text, key_id.start() + 1)
    if bare is not None:
        for start, end in _occurrences(bare.text, None, known):
            found.append((bare.in_raw(start), bare.in_raw(end - 1) + 1))
    found.sort()
    return found


def _num_unsure(text: str, bare: _Bare | None, known: _Known) -> int:
    """Length of the longest end of a text that may be the beginning of a hidden value.

    What comes next may be a backspace, which makes the last character none.
    """
    num = 0
    if text[-1:] in known.endings:
        num = _overlap(text, len(text), known)
    if text[-2:-1] in known.endings and text[-1] != "\n":
        before = _overlap(text, len(text) - 1, known)
        num = max(num, before + 1 if before else 0)
    if bare is None:
        return num
    begin = len(bare.text) - _num_unsure(bare.text, None, known)
    if begin < len(bare.text):
        num = max(num, len(text) - bare.in_raw(begin))
    return max(num, bare.num_cut)


def _overlap(text: str, end: int, known: _Known) -> int:
    """Length of the longest proper beginning of a value that ends `text[:end]`."""
    if not end:
        return 0
    longest = 0
    for form in (*known.endings[text[end - 1]], *known.endings.get(text[end - 2 : end], ())):
        longest = max(longest, _overlap_of(text, end, form))
    if text[end - 1] in _KEY_ID_CHARS:
        key_id = _KEY_ID_BEGINS.search(text[max(0, end - _KEY_ID_LENGTH + 1) : end])
        longest = max(longest, len(key_id[0]) if key_id else 0)
    return longest


def _overlap_of(text: str, end: int, value: str) -> int:
    start = max(0, end - len(value) + 1)
    while (start := text.find(value[0], start, end)) >= 0:
        if value.startswith(text[start:end]):
            return end - start
        start += 1
    return 0


def _with(known: _Known, values: set[str]) -> _Known:
    """What is known with these values besides."""
    forms: dict[str, set[str]] = defaultdict(set)
    for family in (family for value in values for family in _families(value)):
        words = _WORDS.findall(min(family, key=len))
        anchor = max(words, key=len, default="")
        for form in family:
            has_anchor = len(anchor) >= _MIN_ANCHOR_LENGTH and anchor in form
            forms[anchor if has_anchor else form].add(form)
    endings: dict[str, set[str]] = defaultdict(set)
    for form in (form for some in forms.values() for form in some if len(form) > 1):
        for ending in {form[0], *(form[n : n + 2] for n in range(len(form) - 2))}:
            endings[ending].add(form)
        for letter in form[:-1]:
            endings[letter]
    for old, new in ((known.forms, forms), (known.endings, endings)):
        for key, some in old.items():
            new[key] |= some
    return _Known(
        known.values | values,
        {anchor: frozenset(some) for anchor, some in forms.items()},
        {ending: frozenset(some) for ending, some in endings.items()},
        max(known.max_length, *(len(form) for some in forms.values() for form in some)),
    )


def _families(value: str) -> Iterator[set[str]]:
    """The forms of a value, those together that have their letters and digits in common."""
    bare = value.strip()
    lines = bare.splitlines()
    yield _forms(value)
    if bare not in ("", value):
        yield _forms(bare)
    for line in map(str.strip, lines if len(lines) > 1 else []):
        # "-----BEGIN PRIVATE KEY-----" is not secret
        if len(line) >= _MIN_LINE_LENGTH and not line.startswith("-----"):
            yield _forms(line)
    yield from _in_base64(bare.encode(errors="surrogateescape"))


def _in_base64(octets: bytes) -> Iterator[set[str]]:
    """Of base64 what is the value's alone: three forms, by what stands before it.

    A character holds six bits; those at the ends are partly of what stands beside the value.
    """
    for num_before in range(3 if len(octets) >= _MIN_BASE64_OCTETS else 0):
        begin, end = -(-num_before * 8 // 6), (num_before + len(octets)) * 8 // 6
        inner = base64.b64encode(b"\0" * num_before + octets).decode()[begin:end]
        yield {inner, inner.translate(_URL_SAFE)}


_URL_SAFE = str.maketrans("+/", "-_")


def _forms(value: str) -> set[str]:
    """The value as programs write it."""
    octets = value.encode(errors="surrogateescape")
    as_json = json.dumps(value)[1:-1]
    quoted = quote(value, safe="", errors="surrogateescape")
    urls = {
        quoted,
        quote(quoted),
        quote(value, errors="surrogateescape"),
        quote_plus(value, errors="surrogateescape"),
    }
    return {
        value,
        *_escaped(repr(value + "\"'")),
        *_escaped(ascii(value + "\"'")),
        *_escaped(repr(octets + b"\"'")[1:]),
        as_json,
        as_json.replace("/", "\\/"),  # as pandas and PHP do
        json.dumps(value, ensure_ascii=False)[1:-1],
        html.escape(value),
        html.escape(value, quote=False),
        *urls,
        *(_HEX.sub(lambda match: match[0].lower(), url) for url in urls),
    }


_HEX = re.compile("%(?:25)*[0-9A-F]{2}")


def _escaped(shown: str) -> set[str]:
    """Both forms of a `repr` that ends in the two quotes: which is escaped depends on the other."""
    inside = shown[1:-4]  # between the quotes, without the two at the end, one of them escaped
    return {inside, inside.replace("\\'", "'")}
