"""ipyparallel's own client, in another process of the user who has the pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.security.lines import Actor
from tests.security.users import User

pytestmark = pytest.mark.long

CLIENT = """
import json, sys, ipyparallel
client = ipyparallel.Client(sys.argv[1])
view = client[:]
view.execute("here = rank * 10").get(30)
for _ in range(10):  # what is said before the client has subscribed, it does not hear
    done = view.execute("print('from rank', rank)", block=False)
    done.get(30)
    if done.wait_for_output(3):
        break
print(json.dumps({
    "ids": client.ids,
    "pulled": view.pull("here").get(30),
    "applied": view.apply_sync(lambda n: n + here, 1),
    "stdout": done.stdout,
    "queues": sorted(map(str, client.queue_status())),
}))
client.close()
"""


def test_it_connects_and_runs_code_beside_the_notebook(pool: Actor, alice: User) -> None:
    pool.do("run", source="kept = rank")
    found = json.loads(alice.python(CLIENT, pool.do("client_file")))
    assert found["ids"] == [0, 1]
    assert (found["pulled"], found["applied"]) == ([0, 10], [1, 11])
    assert found["stdout"] == ["from rank 0\n", "from rank 1\n"]
    assert found["queues"] == ["0", "1", "unassigned"]
    assert pool.do("run", source="kept, here")["values"] == {"0": [0, 0], "1": [1, 10]}


def test_another_user_cannot_use_the_file_even_if_he_knows_its_name(pool: Actor, bob: User) -> None:
    done = bob.run("cat", pool.do("client_file"))
    assert (done.stdout, "Permission denied" in done.stderr) == ("", True)


def test_keys_are_in_files_of_mode_0600_in_folders_of_mode_0700(pool: Actor) -> None:
    modes = {Path(path): mode for path, mode in pool.do("files").items()}
    keys = {path: mode for path, mode in modes.items() if path.parent.name == "security"}
    assert {path.name for path in keys} >= {"ipcontroller-client.json", "ipcontroller-engine.json"}
    assert set(keys.values()) == {0o600}
    folders = {modes[one] for path in keys for one in path.parents if one in modes}
    assert folders == {0o700}
