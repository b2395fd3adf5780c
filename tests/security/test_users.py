"""The users of these tests are what they are meant to be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.security.users import User

pytestmark = pytest.mark.long

WHO = """
import getpass, json, os, pwd, gpupool, torch
lines = open("/proc/self/status").read().splitlines()
caps = {l.split()[0]: l.split()[1] for l in lines if l.startswith(("Cap", "NoNew"))}
print(json.dumps({
    "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
    "caps": caps,
    "name": [getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name],
    "gpupool": gpupool.__file__,
}))
"""


def test_a_user_has_no_privilege_and_a_name_and_reads_this_python_and_these_sources(
    alice: User, bob: User
) -> None:
    before = Path("/etc/passwd").read_text()
    for user in (alice, bob):
        found = json.loads(user.python(WHO))
        assert found["ids"] == [[user.uid] * 3, [user.uid] * 3, []]
        assert user.uid != os.getuid()
        assert found["caps"].pop("NoNewPrivs:") == "1"
        assert set(found["caps"].values()) == {"0" * 16}
        assert found["name"] == [user.name, user.name]
        assert Path(found["gpupool"]).is_relative_to(Path(__file__).parents[2])
    assert Path("/etc/passwd").read_text() == before
    assert alice.uid != bob.uid
