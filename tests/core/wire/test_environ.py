"""Which variables travel, and that secret values stay hidden however they come back."""

from __future__ import annotations

import pytest

from gpupool.core.errors import OptionsError
from gpupool.core.wire import environ
from tests.support.raising import raises

ENVIRON = {
    "AWS_REGION": "eu",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t!",
    "HF_TOKEN": "hf_abc",
    "HOME": "/",
}


def test_a_plain_name_that_is_not_set_is_an_error_unless_remembered() -> None:
    with raises(OptionsError, "NOSUCH"):
        environ.select(["NOSUCH"], ENVIRON)
    assert environ.select(["NOSUCH", "HOME"], ENVIRON, strict=False) == {"HOME": "/"}


def test_a_typed_value_is_refused_and_not_repeated() -> None:
    with raises(OptionsError, "HF_TOKEN") as caught:
        environ.select(["HF_TOKEN=hf_typed"], ENVIRON)
    assert "hf_typed" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "aws_session_token", "PASSWD", "GH_AUTH", "X_CREDENTIALS"),
    ],
)
def test_a_variable_named_like_a_secret_is_not_inherited(name: str) -> None:
    assert environ.inheritable({name: "v", "PATH": "/bin"}) == {"PATH": "/bin"}
    assert environ.secret_values({name: "canary"}) == {"canary"}


@pytest.mark.parametrize(
    "name",
    [
        *("PRIVATE_NETWORK", "PRIVATE_IP", "IS_PRIVATE_CLOUD", "HOTPLUG", "SACRED", "CREDO_DIR"),
        *("TOKENIZERS_PARALLELISM", "OPTIONS", "WINDSNAME", "CREDS_FILE", "JWT_PATH"),
    ],
)
def test_a_name_that_only_looks_like_it_is_none(name: str) -> None:
    assert environ.inheritable({name: "canary"}) == {name: "canary"}
    assert environ.secret_values({name: "canary"}) == set()


def test_a_secret_within_a_url_is_in_no_first_environment_and_masked() -> None:
    secrets = {
        "DATA_URL": "https://acc.blob.core.windows.net/c/b?sv=2020&sig=canary%2B1",
        "PIP_INDEX_URL": "https://CANARYCANARY@host/simple",
        "JUPYTER_SERVER_URL": "http://h:8888/?token=canary2",
        "http_proxy": "ada:canary3@proxy:3128",
        "MODELS": "s3://ada:canary/4@bucket/models",
    }
    assert environ.inheritable(secrets) == {}
    assert environ.sent_after_start(secrets) == secrets
    values = {"canary%2B1", "canary+1", "CANARYCANARY", "canary2", "canary3", "canary/4"}
    assert environ.secret_values(secrets) == values


def test_secret_values_are_those_named_so_and_passwords_in_urls_if_long_enough_to_mask() -> None:
    values = environ.secret_values(
        {
            "HF_TOKEN": "hf_abc",
            "PIN_KEY": "1234",
            "HOME": "/home/ada",
            "HTTPS_PROXY": "http://ada:lovelace%21@proxy:3128",
            "AWS_CREDENTIAL_EXPIRATION": "2026-11-05T14:03:00+00:00",
        }
    )
    assert values == {"hf_abc", "lovelace%21", "lovelace!"}


def test_the_name_of_a_file_that_holds_a_secret_is_none() -> None:
    places = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/run/token", "SSH_AUTH_SOCK": "/tmp/ssh-x/agent.1"}
    assert environ.inheritable(places) == places
    assert environ.secret_values(places) == set()
    assert environ.inheritable({"TOKEN_FILE_CONTENT": "x" * 8, "FILE_TOKEN": "y" * 8}) == {}
