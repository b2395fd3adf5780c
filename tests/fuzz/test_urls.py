"""Any environment and any URL: no exception, linear time, and no password is shown or inherited."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.wire import environ
from gpupool.core.wire.masking import passwords, without_passwords
from tests.fuzz.limits import fuzzed, only_our_errors

any_text = st.text() | st.text("/:@?&=#;%. \"'htps0az")
names = st.text(min_size=1) | st.sampled_from(["JWT", "API_KEY", "HTTPS_PROXY", "PATH", "A[", "*"])
secret = st.text("QRSTUVWXYZ0123456789-_~%+=!$", min_size=10, max_size=60)


@fuzzed
@given(any_text, st.dictionaries(names, any_text), st.lists(names | any_text))
def test_any_text_is_looked_through(
    text: str, variables: dict[str, str], patterns: list[str]
) -> None:
    with only_our_errors():
        found = passwords(text)
        without_passwords(text)
        kept = environ.inheritable(variables)
        sent = environ.sent_after_start(variables)
        environ.secret_values(variables)
    assert "" not in found
    assert not set(kept) & set(sent)
    assert set(kept) | set(sent) <= set(variables)
    with only_our_errors():
        environ.select(patterns, variables)


@fuzzed
@given(
    st.sampled_from(["https://{0}@host/x", "s3://ada:{0}@bucket/x", "http://:{0}@h:3128", "{1}"])
    | st.sampled_from(["ada:{0}@host:3128", "https://h/x?sig={0}", "https://h/?a=1&token={0}#b"]),
    secret,
    st.text("abc ,\"'", max_size=5),
)
def test_a_password_in_a_url_is_neither_inherited_nor_shown(
    form: str, password: str, around: str
) -> None:
    url = form.format(password, f"s3://ada:QQQQ/{password}@bucket")
    with only_our_errors():
        assert environ.inheritable({"A": url}) == {}
        assert password in " ".join(environ.secret_values({"A": url}))
        shown = without_passwords(f"{around} {url}")
    assert password not in shown or "//" not in url
