"""Secret values stay hidden however they come back, and however a text is cut."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.urls import passwords, without_passwords
from gpupool.core.wire import environ
from gpupool.core.wire.masking import MASK, Redactor, Secrets, redact, redact_all
from tests.fuzz.limits import fuzzed, only_our_errors

CANARY = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"  # as AWS shows one in its pages
PEM = """-----BEGIN PRIVATE KEY-----
MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj
MzEfYYjiWA4R4/M2bS1GB4t7NXp98C3SC6dVMvDuictGeurT8jNbvJZHtCSuYEvu
-----END PRIVATE KEY-----
"""


def test_text_that_cannot_begin_a_secret_is_not_held_back() -> None:
    redactor = Redactor(Secrets(["secret"]))
    assert redactor.feed("progress 10 %\n") == "progress 10 %\n"
    assert redactor.feed("the sec") == "the "
    assert redactor.feed("ond") == "second"
    assert redactor.feed("secre") == ""
    assert redactor.feed("", is_last=True) == "secre"


def test_a_stream_that_is_all_secret_does_not_grow_the_memory() -> None:
    redactor = Redactor(Secrets(["oooooo"]))
    shown = "".join(redactor.feed("o" * 1000) for _ in range(100))
    assert shown + redactor.feed("", is_last=True) == MASK
    assert redact("abcdefghij", Secrets(["abcdef", "efghij"])) == MASK  # no end of one is left


WAYS: list[Callable[[str], str]] = [
    *(str, repr, html.escape, quote, quote_plus),
    lambda value: repr(value.encode()),
    lambda value: json.dumps({"a": value}),
    lambda value: base64.b64encode(value.encode()).decode(),
    lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
    lambda value: base64.b64encode(b"ada:" + value.encode()).decode(),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_secret_is_masked_in_each_way_to_show_it(way: Callable[[str], str]) -> None:
    text, redactor = f"key: {way(CANARY)} is there\n", Redactor(Secrets([CANARY, "another-one-42"]))
    shown = "".join([*map(redactor.feed, text), redactor.feed("", is_last=True)])
    assert shown.count(MASK) == 1
    # what is left of it are the ends of base64, of which some bits are the value's
    assert len(shown) < len("key:  is there\n") + 30
    assert shown == redact(text, Secrets([CANARY, "another-one-42"]))


@pytest.mark.parametrize("between", ["\n", "\\n"])
def test_of_a_value_of_several_lines_each_is_masked(between: str) -> None:
    shown = redact(between.join(PEM.splitlines()), Secrets([PEM]))
    assert "MII" not in shown
    assert "MzE" not in shown


def test_ordinary_text_stays_though_a_short_secret_has_base64() -> None:
    text = "".join(base64.b64encode(b"x" * n + b"hunter2").decode() for n in range(3))
    assert redact(text, Secrets(["hunter2"])) == text
    lines = "first\nshort\nlines\nof a very long value"
    assert "first" in redact("the first of many short lines", Secrets([lines]))


def test_a_value_that_is_added_later_is_masked_from_then_on_also_in_what_is_held() -> None:
    known = Secrets(["secret-one"])
    redactor = Redactor(known)
    assert redactor.feed("secret-tw") == "secret-tw"
    assert redactor.feed("o secret-") == "o "
    known.add(["secret-two"])
    assert redactor.feed("two secret-one", is_last=True) == f"{MASK} {MASK}"


def test_every_text_in_plain_data_is_masked() -> None:
    data = {"secret": 1, "a": ["a secret", None, 2.5], "b": {"c": ("secret",)}, ("secret",): 3}
    shown = {MASK: 1, "a": [f"a {MASK}", None, 2.5], "b": {"c": (MASK,)}, (MASK,): 3}
    assert redact_all(data, Secrets(["secret"])) == shown


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("http://ada:lovelace@proxy:3128", {"lovelace"}),
        ("postgres://ada:l%40ve@host/db", {"l%40ve", "l@ve"}),
        ("s3://AKIAIOSFODNN7EXAMPLE:K7/MDENG/bPx@bucket/a@b", {"K7/MDENG/bPx"}),
        ("https://ghp0TOKENTOKEN@host/simple", {"ghp0TOKENTOKEN"}),
        ("https://host/a?sv=1&sig=a%2Bb&x=2#access_token=xyz", {"a%2Bb", "a+b", "xyz"}),
        ("ada:lovelace@proxy:3128", {"lovelace"}),
        ("http://proxy:3128", set()),
        ("ssh://git@host:22/x", set()),
        ("https://christopher@host/x", set()),
    ],
)
def test_passwords_are_found_in_urls_and_not_shown(value: str, found: set[str]) -> None:
    assert passwords(value) == found
    if "//" in value:
        assert not any(password in without_passwords(f"<{value}>") for password in found)
        assert (without_passwords(value) == value) == (not found and "@host" not in value)


# ---- any secret in any text, or in any URL ------------------------------------------------------

# No letter of the mask, few others: values overlap, repeat, contain each other.
LETTERS = "xyz+/A%\\\"'&\n @"
values = st.lists(
    st.text(LETTERS, min_size=2, max_size=12) | st.text(min_size=4, max_size=30),
    min_size=1,
    max_size=5,
)
noise = st.text(LETTERS, max_size=9) | st.text(max_size=9)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Secrets, and the pieces of a text that shows some of them, cut anywhere."""
    secrets = draw(values)
    parts = draw(st.lists(noise | st.sampled_from(secrets), max_size=12))
    text = "".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return secrets, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@fuzzed
@given(streams())
def test_no_secret_comes_through_however_a_stream_is_cut(
    stream: tuple[list[str], list[str]],
) -> None:
    secrets, pieces = stream
    with only_our_errors():
        redactor = Redactor(Secrets(secrets))
        shown = "".join([*map(redactor.feed, pieces), redactor.feed("", is_last=True)])
        whole = redact("".join(pieces), Secrets(secrets))
    assert shown == whole
    # what the masks themselves and the text beside them make up is no secret that was shown
    assert not any(value in part for value in secrets for part in shown.split(MASK))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("A" * 500_000, "A" * 100),
        ("ab" * 1_000_000, "ab" * 50 + "c"),
        ("secret-of-min" * 100_000, "secret-of-mine"),
        ("\n".join(["line of a file of keys"] * 2), "\n".join(f"{n:040}" for n in range(500))),
    ],
)
def test_long_texts_are_masked_in_time(text: str, secret: str) -> None:
    secrets = Secrets([secret])
    with only_our_errors():
        redact(text, secrets)


typed = st.text("QRSTUVWXYZ0123456789-_~%+=!$", min_size=10, max_size=60)


@fuzzed
@given(
    st.sampled_from(["https://{0}@host/x", "s3://ada:{0}@bucket/x", "http://:{0}@h:3128", "{1}"])
    | st.sampled_from(["ada:{0}@host:3128", "https://h/x?sig={0}", "https://h/?a=1&token={0}#b"]),
    typed,
    st.text("abc ,\"'", max_size=5),
)
def test_a_password_in_a_url_is_neither_inherited_nor_shown(
    form: str, password: str, around: str
) -> None:
    url = form.format(password, f"s3://ada:QQQQ/{password}@bucket")
    with only_our_errors():
        assert environ.inheritable({"A": url}) == {}
        assert environ.sent_after_start({"A": url}) == {"A": url}
        assert password in " ".join(environ.secret_values({"A": url}))
        shown = without_passwords(f"{around} {url}")
    assert password not in shown or "//" not in url
