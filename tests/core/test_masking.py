"""Secret values stay hidden however they come back, and however a text is cut."""

from __future__ import annotations

import html
import json
import re
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.masking import MASK, Redactor, Secrets, redact, redact_all, uncut

KEY_ID = "ASIA" + "Z2QX" * 4


@pytest.mark.parametrize(
    ("text", "hidden", "shown"),
    [
        ("a secret here", ["secret"], f"a {MASK} here"),
        ("secretsecret", ["secret"], MASK * 2),
        ("secret42!", ["secret", "secret42"], f"{MASK}!"),
        ("abcdefghij", ["abcdef", "efghij"], MASK),  # no end of the second one is left
        ("the word hidden", ["hidden"], f"the word {MASK}"),
        ("nothing", [], "nothing"),
        ("", ["secret"], ""),
    ],
)
def test_hidden_values_are_masked(text: str, hidden: list[str], shown: str) -> None:
    assert redact(text, Secrets(hidden)) == shown


# Few letters, so that values overlap, repeat and contain each other; none of the mask's letters.
secrets = st.lists(st.text("xyz", min_size=2, max_size=6), min_size=1, max_size=4)
chunks = st.lists(st.text("xyz\n", max_size=6), max_size=12)


@given(secrets, chunks)
def test_however_a_stream_is_cut_no_secret_gets_through(
    hidden: list[str], parts: list[str]
) -> None:
    redactor = Redactor(Secrets(hidden))
    shown = [redactor.feed(part) for part in parts] + [redactor.flush()]
    assert not any(value in "".join(shown) for value in hidden)
    assert "".join(shown) == redact("".join(parts), Secrets(hidden))


@given(st.lists(st.text("abc", max_size=5)))
def test_a_stream_without_secrets_is_passed_on_at_once(parts: list[str]) -> None:
    redactor = Redactor(Secrets())
    assert [redactor.feed(part) for part in parts] == parts


def test_text_that_cannot_begin_a_secret_is_not_held_back() -> None:
    redactor = Redactor(Secrets(["secret"]))
    assert redactor.feed("progress 10 %\n") == "progress 10 %\n"
    assert redactor.feed("the sec") == "the "
    assert redactor.feed("ond") == "second"
    assert redactor.feed("secre") == ""
    assert redactor.flush() == "secre"


def test_a_stream_that_is_all_secret_does_not_grow_the_memory() -> None:
    redactor = Redactor(Secrets(["oooooo"]))
    shown = "".join(redactor.feed("o" * 1000) for _ in range(100)) + redactor.flush()
    assert shown == MASK


@pytest.mark.parametrize("write", [repr, json.dumps, html.escape, quote, quote_plus, ascii])
@pytest.mark.parametrize("secret", ["wJalrX/K7+Eng=", "a\"b'c\\d&<é>", "line 1\nline 2", "a b c d"])
def test_a_value_is_found_in_the_forms_in_which_programs_write_it(write: Any, secret: str) -> None:
    assert redact(f"<{write(secret).strip(chr(34) + chr(39))}>", Secrets([secret])) == f"<{MASK}>"
    assert redact(repr(secret.encode()), Secrets([secret])).count(MASK) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"id {KEY_ID}.", f"id {MASK}."),
        ("AKIA" + "A" * 16, MASK),
        ("AKIA" + "a" * 16, "AKIA" + "a" * 16),
        ("EURASIA AND AFRICA", "EURASIA AND AFRICA"),
    ],
)
def test_a_key_id_is_masked_though_nobody_told(text: str, shown: str) -> None:
    assert redact(text, Secrets()) == shown


@given(st.lists(st.sampled_from(["A", "K", "SIA", "KIA", "Z" * 7, "9", "-", "\n"]), max_size=40))
def test_however_a_stream_is_cut_no_key_id_gets_through(parts: list[str]) -> None:
    redactor = Redactor(Secrets())
    shown = "".join([*map(redactor.feed, parts), redactor.flush()])
    assert shown == redact("".join(parts), Secrets())
    assert not re.search("A[KS]IA[A-Z0-9]{16}", shown)


def test_a_value_that_is_added_later_is_masked_from_then_on_also_in_what_is_held() -> None:
    known = Secrets(["secret-one"])
    redactor = Redactor(known)
    assert redactor.feed("secret-tw") == "secret-tw"
    assert redactor.feed("o secret-") == "o "
    known.add(["secret-two"])
    assert redactor.feed("two secret-one") + redactor.flush() == f"{MASK} {MASK}"


def test_every_text_in_plain_data_is_masked() -> None:
    data = {"a": ["secret", 1, None], "b": {"c": "my secret", "d": 2.5}}
    shown = {"a": [MASK, 1, None], "b": {"c": f"my {MASK}", "d": 2.5}}
    assert redact_all(data, Secrets(["secret"])) == shown


def test_the_values_are_not_in_the_repr() -> None:
    assert repr(Secrets(["secret"])) == "Secrets(1 values)"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_a_text_is_cut_beside_hidden_values_only(text: str, values: list[str]) -> None:
    secrets = Secrets(values)
    for position in range(len(text) + 1):
        cut = uncut(text, position, secrets)
        assert position <= cut <= len(text)
        for value in values:
            starts = [n for n in range(len(text)) if text.startswith(value, n)]
            assert not any(start < cut < start + len(value) for start in starts)
