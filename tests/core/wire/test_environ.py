"""Which variables travel, and which of their values are secret."""

from __future__ import annotations

import pytest

from gpupool.core.errors import OptionsError
from gpupool.core.wire import environ
from tests.support.raising import raises

ENVIRON = {"HF_TOKEN": "hf_abc", "HOME": "/"}
SECRET = ["AWS_SECRET_ACCESS_KEY", "aws_session_token", "PASSWD", "GH_AUTH", "X_CREDENTIALS"]
PLAIN = ["PRIVATE_NETWORK", "HOTPLUG", "SACRED", "CREDO_DIR", "TOKENIZERS_PARALLELISM", "OPTIONS"]
PLAIN += ["CREDS_FILE", "JWT_PATH", "SSH_AUTH_SOCK", "AWS_WEB_IDENTITY_TOKEN_FILE"]


def test_what_is_not_set_is_an_error_unless_remembered_and_a_typed_value_is_not_repeated() -> None:
    for pattern, name in (("NOSUCH", "NOSUCH"), ("NO*", "NO*"), ("HF_TOKEN=hf_typed", "HF_TOKEN")):
        with raises(OptionsError, name) as caught:
            environ.select([pattern], ENVIRON)
        assert "hf_typed" not in str(caught.value)
    assert environ.select(["NOSUCH", "HO*"], ENVIRON, strict=False) == {"HOME": "/"}


@pytest.mark.parametrize("name", SECRET)
def test_a_variable_named_like_a_secret_is_not_inherited(name: str) -> None:
    assert environ.inheritable({name: "v", "PATH": "/bin"}) == {"PATH": "/bin"}
    assert environ.secret_values({name: "canary"}) == {"canary"}
    assert environ.secret_values({name: "short"}) == set()  # to mask it would hit ordinary words


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_that_only_looks_like_it_is_none(name: str) -> None:
    assert environ.inheritable({name: "canary"}) == {name: "canary"}
    assert environ.secret_values({name: "canary"}) == set()


def test_with_other_hosts_groups_use_the_interface_unless_the_user_says_otherwise() -> None:
    fixed, by_default = environ.for_groups("eth1")
    assert (by_default["GLOO_SOCKET_IFNAME"], by_default["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_DISABLE"}
    assert not fixed.keys() & names
    assert not by_default.keys() & {"NCCL_NET", "NCCL_IB_DISABLE"}
