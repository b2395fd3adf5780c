"""No sentence that users can meet changes unseen: a change is a diff of tests/messages/."""

from __future__ import annotations

import difflib

import pytest

from tests.support import messages


def test_sentences_are_those_in_the_snapshots(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-messages"):
        messages.rewrite()
    now, before = messages.collect(), messages.kept()
    changes = [
        line
        for name in sorted(now.keys() | before.keys())
        for line in difflib.unified_diff(
            before.get(name, "").splitlines(),
            now.get(name, "").splitlines(),
            f"tests/messages/{name}",
            "gpupool/",
            n=0,
            lineterm="",
        )
    ]
    assert not changes, "\n".join(
        ["sentences changed: run pytest --rewrite-messages and look at the diff", *changes]
    )
