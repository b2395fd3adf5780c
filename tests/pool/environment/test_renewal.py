"""Short-lived AWS credentials on the ranks: new ones come in time, while the ranks compute."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool import CredentialsError, Pool
from gpupool.core.wire.masking import Secrets
from gpupool.pool import session
from gpupool.pool.environment.environment import AwsChain
from tests.servers.issuer import Issuer
from tests.support.processes import until
from tests.support.raising import raises

# One cell: the keys that a rank sees, and those that a botocore session made at its start uses,
# until there are three.
WATCH = """
import os, time
from botocore.session import Session
credentials = Session(profile=None).get_credentials()
seen, used = set(), set()
end = time.monotonic() + {seconds}
while min(len(seen), len(used)) < 3 and time.monotonic() < end:
    seen.add(os.environ["AWS_ACCESS_KEY_ID"][-4:])
    used.add(credentials.get_frozen_credentials().access_key[-4:])
    sum(range(20_000))
    time.sleep(0.02)
def is_same():
    return credentials.get_frozen_credentials().token == os.environ["AWS_SESSION_TOKEN"]
while not is_same() and time.monotonic() < end:  # they are just being set, one after the other
    time.sleep(0.01)
(len(seen), len(used), is_same())
"""


@pytest.fixture
def forgetful(pool2: Pool) -> Iterator[Pool]:
    """Two ranks that lose the AWS credentials of the test at its end."""
    yield pool2
    pool = session.find()  # not a new one: that would inherit this test's AWS_PROFILE
    if pool is not None:
        pool.propagate_env("AWS_*", unset=True)


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    """Keys that are good for 4 s, for botocore in this process."""
    issuer = Issuer(tmp_path, lifetime_s=4)
    os.environ.update(issuer.env)
    return issuer


def test_keys_are_renewed_on_every_rank_while_a_cell_runs(forgetful: Pool, issuer: Issuer) -> None:
    forgetful.propagate_env(aws=True)
    result = forgetful.run(WATCH.format(seconds=60), timeout_s=100)
    for rank in (0, 1):
        num_seen, num_used, same = result[rank]
        assert num_seen >= 3, "renewed at least twice"
        assert num_used >= 3, "a session that was made before uses the new ones"
        assert same
    assert forgetful.status().credentials.endswith(", renewed automatically")


@pytest.mark.long
def test_what_cannot_be_renewed_is_told_once_and_goes_on_when_it_can_be_again(
    forgetful: Pool, issuer: Issuer, capfd: pytest.CaptureFixture[str]
) -> None:
    forgetful.propagate_env(aws=True)
    issuer.fail("the login has expired")
    until(lambda: "could not be renewed" in forgetful.status().credentials, 10)
    time.sleep(1.5)  # more tries fail meanwhile
    sentence = forgetful.status().credentials
    assert "the login has expired. Log in (`aws sso login`)" in sentence
    assert "`%gpupool env --aws`" in sentence
    told = capfd.readouterr()
    assert told.err.startswith("gpupool: AWS credentials ")
    assert len((told.out + told.err).splitlines()) == 1, "no log of botocore's either"
    issuer.fail("")
    until(lambda: "renewed automatically" in forgetful.status().credentials, 10)
    newest = "import os; os.environ['AWS_ACCESS_KEY_ID'][-1]"
    # a next one may come at any moment
    until(lambda: {*forgetful.run(newest).values()} == {str(issuer.num_issued)[-1]}, 10)


def test_the_chain_keeps_its_profile_and_sees_what_is_new_in_it(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    os.environ.update(AWS_SHARED_CREDENTIALS_FILE=str(file), AWS_PROFILE="lab")
    text = "[lab]\naws_access_key_id = {}\naws_secret_access_key = {}\n[other]\n"
    file.write_text(text.format("AKONE", "secret-one"))
    chain = AwsChain(Secrets())
    assert chain.resolve().variables["AWS_SECRET_ACCESS_KEY"] == "secret-one"
    os.environ["AWS_PROFILE"] = "other"
    file.write_text(text.format("AKTWO", "secret-two"))
    found = chain.resolve()
    assert found.variables.items() >= {
        ("AWS_ACCESS_KEY_ID", "AKTWO"),
        ("AWS_SECRET_ACCESS_KEY", "secret-two"),
    }
    assert found.expires_at == math.inf
    assert "secret-two" not in repr(found)


def test_a_chain_that_fails_says_why_in_one_line(issuer: Issuer, pool2: Pool) -> None:
    issuer.fail("first line\nsecond line")
    with raises(CredentialsError, "custom-process: first line. ", kind="no key"):
        pool2.propagate_env(aws=True)
