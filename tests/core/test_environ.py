"""Which variables travel, and that secret values stay hidden however they come back."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core import environ
from gpupool.core.environ import MASK, Redactor, redact
from gpupool.core.errors import OptionsError

ENVIRON = {
    "AWS_REGION": "eu",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t!",
    "HF_TOKEN": "hf_abc",
    "HOME": "/",
}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["HOME"], ["HOME"]),
        (["AWS_*"], ["AWS_REGION", "AWS_SECRET_ACCESS_KEY"]),
        (["*_TOKEN", "HOME"], ["HF_TOKEN", "HOME"]),
        (["H[FO]*"], ["HF_TOKEN", "HOME"]),
        (["NOSUCH_*"], []),
        (["aws_*"], []),
        ([], []),
    ],
)
def test_names_and_globs_select(patterns: list[str], names: list[str]) -> None:
    assert environ.select(patterns, ENVIRON) == {name: ENVIRON[name] for name in names}


def test_a_plain_name_that_is_not_set_is_an_error_unless_remembered() -> None:
    with pytest.raises(OptionsError, match=r"^NOSUCH is not set in the notebook's environment\.$"):
        environ.select(["NOSUCH"], ENVIRON)
    assert environ.select(["NOSUCH", "HOME"], ENVIRON, strict=False) == {"HOME": "/"}


def test_a_typed_value_is_refused_and_not_repeated() -> None:
    with pytest.raises(OptionsError) as caught:
        environ.select(["HF_TOKEN=hf_typed"], ENVIRON)
    assert str(caught.value).startswith("HF_TOKEN=...: name the variable only")
    assert "hf_typed" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "aws_session_token", "PASSWD", "GH_AUTH", "X_CREDENTIALS"],
)
def test_a_variable_named_like_a_secret_is_not_inherited(name: str) -> None:
    assert environ.inheritable({name: "v", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_apply_sets_and_removes() -> None:
    os.environ["GPUPOOL_OLD"] = "old"
    environ.apply({"GPUPOOL_NEW": "new"}, ["GPUPOOL_OLD", "GPUPOOL_NOSUCH"])
    assert os.environ["GPUPOOL_NEW"] == "new"
    assert "GPUPOOL_OLD" not in os.environ


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_fingerprint_tells_equal_from_different_and_nothing_else(a: str, b: str) -> None:
    assert len(environ.fingerprint(a)) == 6
    assert set(environ.fingerprint(a)) <= set("0123456789abcdef")
    assert environ.fingerprint(a) == environ.fingerprint(a)
    if a == b:
        assert environ.fingerprint(a) == environ.fingerprint(b)
    if len(a) > 6:
        assert a not in environ.fingerprint(a)


def test_fingerprints_differ_between_values() -> None:
    assert len({environ.fingerprint(str(i)) for i in range(100)}) > 95


def test_secret_values_are_those_named_so_that_are_long_enough_to_mask() -> None:
    values = environ.secret_values(
        {"HF_TOKEN": "hf_abc", "PIN_KEY": "1234", "HOME": "/home/ada", "PEM_KEY": "line 1\nline 2"}
    )
    assert values == {"hf_abc", "line 1\nline 2", "line 1\\nline 2"}


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
    assert redact(text, hidden) == shown


# Few letters, so that values overlap, repeat and contain each other; none of the mask's letters.
secrets = st.lists(st.text("xyz", min_size=2, max_size=6), min_size=1, max_size=4)
chunks = st.lists(st.text("xyz\n", max_size=6), max_size=12)


@given(secrets, chunks)
def test_however_a_stream_is_cut_no_secret_gets_through(
    hidden: list[str], parts: list[str]
) -> None:
    redactor = Redactor(hidden)
    shown = [redactor.feed(part) for part in parts] + [redactor.flush()]
    assert not any(value in "".join(shown) for value in hidden)
    assert "".join(shown) == redact("".join(parts), hidden)


@given(st.lists(st.text("abc", max_size=5)))
def test_a_stream_without_secrets_is_passed_on_at_once(parts: list[str]) -> None:
    redactor = Redactor([])
    assert [redactor.feed(part) for part in parts] == parts


def test_text_that_cannot_begin_a_secret_is_not_held_back() -> None:
    redactor = Redactor(["secret"])
    assert redactor.feed("progress 10 %\n") == "progress 10 %\n"
    assert redactor.feed("the sec") == "the "
    assert redactor.feed("ond") == "second"
    assert redactor.feed("secre") == ""
    assert redactor.flush() == "secre"


def test_a_stream_that_is_all_secret_does_not_grow_the_memory() -> None:
    redactor = Redactor(["oooooo"])
    shown = "".join(redactor.feed("o" * 1000) for _ in range(100)) + redactor.flush()
    assert shown == MASK
