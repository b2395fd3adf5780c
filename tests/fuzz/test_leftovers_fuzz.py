"""Files that an earlier agent is said to have left: nonsense in them is of no agent."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpupool.pool.processes.leftovers import reap
from tests.fuzz.limits import assert_plain, fuzzed, only_our_errors

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=20,
)
NAMES = st.sampled_from(["agent", "client", "controller", "rank 0"]) | st.text(max_size=20)
NUMBERS = st.lists(st.integers(-(2**70), 2**70), min_size=2, max_size=2)
STATES = st.dictionaries(NAMES, NUMBERS | ANYTHING) | ANYTHING
CONTENTS = STATES.map(json.dumps).map(str.encode) | st.binary(max_size=200)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "gpupool-abandoned"


@fuzzed
@given(CONTENTS)
@example(b"[" * 5000)
@example(b"[" + b"9" * 5000 + b"]")
@example(json.dumps({"agent": [1, 1], "client": [1, 1], "\x1b[2J": [1, 1]}).encode())
@example(json.dumps({"agent": [1, 1], "client": [1, 1], "rank 0": [10**4000, 1]}).encode())
@example(json.dumps({"agent": ["../self", 1], "client": [1, 1]}).encode())
@example(json.dumps({"agent": {}, "client": [1, 1]}).encode())
def test_what_a_folder_of_an_agent_may_hold(folder: Path, content: bytes) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "processes.json").write_bytes(content)
    with only_our_errors():
        assert_plain(reap())
