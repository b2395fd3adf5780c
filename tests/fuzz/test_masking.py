"""Any secret in any text, cut anywhere, or in any URL: no exception, and it is not shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.urls import without_passwords
from gpupool.core.wire import environ
from gpupool.core.wire.masking import MASK, Redactor, Secrets, redact
from tests.fuzz.limits import fuzzed, only_our_errors

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
        ("AKIA" * 200_000, "secret-of-mine"),
        ("secret-of-min" * 100_000, "secret-of-mine"),
        ("\n".join(["line of a file of keys"] * 2), "\n".join(f"{n:040}" for n in range(500))),
    ],
)
def test_long_texts_are_masked_in_time(text: str, secret: str) -> None:
    secrets = Secrets([secret])
    with only_our_errors():
        redact(text, secrets)


passwords = st.text("QRSTUVWXYZ0123456789-_~%+=!$", min_size=10, max_size=60)


@fuzzed
@given(
    st.sampled_from(["https://{0}@host/x", "s3://ada:{0}@bucket/x", "http://:{0}@h:3128", "{1}"])
    | st.sampled_from(["ada:{0}@host:3128", "https://h/x?sig={0}", "https://h/?a=1&token={0}#b"]),
    passwords,
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
