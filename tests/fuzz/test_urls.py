"""Any password in any URL: no exception, linear time, and it is neither shown nor inherited."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.urls import without_passwords
from gpupool.core.wire import environ
from tests.fuzz.limits import fuzzed, only_our_errors

secret = st.text("QRSTUVWXYZ0123456789-_~%+=!$", min_size=10, max_size=60)


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
        assert environ.sent_after_start({"A": url}) == {"A": url}
        assert password in " ".join(environ.secret_values({"A": url}))
        shown = without_passwords(f"{around} {url}")
    assert password not in shown or "//" not in url
