"""What another user hears and reads of a pool."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import pytest

from tests.security.lines import Actor
from tests.security.users import User
from tests.support.processes import until

pytestmark = pytest.mark.long

SAYS = """
result = pool.run("print('diagnosis of patient', 15 + rank, flush=True); rank")
[(result[rank], result.text(rank)) for rank in result]
"""
SAID = [(rank, f"diagnosis of patient {15 + rank}\n") for rank in range(2)]
TRAIN = """
from tests.support.trainings import network, samples
gpupool.train(network(), samples(32), epochs=3, batch_size=8).history.loss
"""
LISTENERS = """
import psutil
me = psutil.Process()
found = [one for p in (me, *me.children(recursive=True)) for one in p.net_connections("inet")]
[one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]
"""
# for ever, to everybody; not the pool's: what can be heard, is
PUBLISH = """
import threading, time, zmq
speaker = zmq.Context.instance().socket(zmq.PUB)
port = speaker.bind_to_random_port("tcp://127.0.0.1")
def speak():
    while True:
        speaker.send(b"heard by everybody")
        time.sleep(0.02)
threading.Thread(target=speak, daemon=True).start()
port
"""


def test_another_user_hears_nothing_of_cells_and_trainings(
    pool: Actor, alice: User, bob: User
) -> None:
    """Bob is subscribed to every port of Alice, as far as she lets him."""

    def run(source: str) -> Any:
        return literal_eval(pool.do("run", source=source))

    sniffer, ports = bob.act("security.attackers", "sniffer", alice.uid), run(LISTENERS)
    until(lambda: {*map(str, ports)} <= sniffer.do("report")["admitted"].keys(), 10.0, "answers")
    open_port = str(run(PUBLISH))
    until(lambda: open_port in sniffer.do("report")["heard"], 10.0, "his hearing")
    for _ in range(5):
        assert run(SAYS) == SAID
    assert len(run(TRAIN)) == 12
    before = sniffer.do("report")["heard"][open_port]
    until(lambda: sniffer.do("report")["heard"][open_port] > before, 10.0, "his last word")
    report = sniffer.do("report")
    assert report["heard"].keys() == {open_port}
    let_in = [port for port, is_in in report["admitted"].items() if is_in]
    assert let_in == [open_port]  # so nothing that he sends arrives, either
