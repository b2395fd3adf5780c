"""ipyparallel's own client, in another process of the user who has the pool."""

from __future__ import annotations

import json

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
