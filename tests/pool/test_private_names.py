"""What we rely on in other packages that they do not promise, and that nothing else would miss.

Where a private name that gpupool uses is gone, tests of what it is used for fail. Of these only
the speed, a rare moment or an odd line in a log would tell; each test names the file to change.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from ipyparallel.controller import hub

from gpupool import Pool
from gpupool.pool.engines.client import plain_client
from tests.support.processes import folder_of, until

TIMEOUT_S = 60.0


def test_the_controller_only_sleeps_by_its_time_and_finds_its_heart_monitor_by_name() -> None:
    """`app.time`, `heartmonitor.HeartMonitor`, its `caller`: host/controller.py."""
    from ipyparallel.controller import app, heartmonitor

    assert re.findall(r"\btime\.\w+", inspect.getsource(app)) == ["time.sleep"]
    assert "= HeartMonitor(" in inspect.getsource(heartmonitor._setup_heartmonitor)
    assert "self.caller = ioloop.PeriodicCallback(" in inspect.getsource(
        heartmonitor.HeartMonitor.start
    )


def test_the_controller_follows_calls_without_reading_what_they_publish(pool2: Pool) -> None:
    """`hub.monitor`, `monitor_handlers` and `extract_dates`, in host/controller.py."""
    assert "b'iopub': self.monitor_iopub_message" in inspect.getsource(hub.Hub)
    assert callable(hub.extract_dates)
    asked = pool2.client[0].apply_async(lambda: 42)
    assert asked.get(20.0) == 42
    until(lambda: asked.msg_ids[0] in pool2.client.queue_status([0], True)[0]["completed"], 20.0)


def test_a_call_is_followed_by_idle_only_if_it_has_published_something(pool2: Pool) -> None:
    """`_publish_status`, in engine/output/channel.py and pool/engines/client.py."""
    client: Any = plain_client(
        folder_of(pool2) / "profile" / "security" / "ipcontroller-client.json"
    )
    heard: list[str] = []

    def hear(frames: Any) -> None:
        message = client.session.deserialize(client.session.feed_identities(frames)[1])
        parent, content = message["parent_header"], message["content"]
        is_call = parent["msg_type"] == "apply_request"  # not what watches over the call
        if parent["session"] != client.session.session and is_call:
            said = content.get("execution_state") or content.get("text")
            heard.append(said or message["msg_type"])

    client._io_loop.add_callback(client._iopub_stream.on_recv, hear)
    shown = "import os\nos.write(1, b'octets\\n')\n6 * 7"
    for cell in ("x = 1", "1 / 0", "print('printed')", shown, "print('end')"):
        pool2.begin(cell, ranks=(0,), on_output=lambda *_: None).wait(60.0)
    until(lambda: heard[-2:] == ["end\n", "idle"], 20.0)
    client.close(linger=0)
    assert heard[:-2] == ["printed\n", "idle", "octets\n", "execute_result", "idle"]


def test_a_client_that_has_missed_the_notifications_asks_for_the_engines(pool2: Pool) -> None:
    """`_update_engines`, `_send` and `_query_stream`, in pool/engines/client.py."""
    client: Any = pool2.engines._client
    theirs = client._client
    engines = dict(theirs._engines)
    theirs._ids.clear()
    theirs._engines.clear()
    assert client.ranks == []
    client.ask_for_engines()
    until(lambda: client.ranks == [0, 1], TIMEOUT_S)
    assert dict(theirs._engines) == engines
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}


def test_a_hook_of_ddp_stays_where_it_makes_its_reducer_of_its_state(pool2: Pool) -> None:
    """`_comm_hooks`, `_register_comm_hook`, a static graph: engine/group/ddp_replicas.py."""
    source = """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(1, 1), static_graph=True)
hook = lambda state, bucket: None
model.register_comm_hook("state", hook)
del model.reducer, model.logger
state = {k: v for k, v in vars(model).items() if k != "process_group"}
del model.process_group
model.__setstate__(state)
facts = [model._comm_hooks == [(hook, "state")], "reducer" in vars(model)]
dist._register_comm_hook(model.reducer, "state", hook)
facts
"""
    assert pool2.run(source)[0] == [True, True]


def test_a_worker_of_a_dataloader_ends_well_when_its_parent_terminates_it() -> None:
    """`_workers` of its iterator; else torch raises an error in the main thread:
    data/reading/processes.py."""
    data = torch.utils.data.TensorDataset(torch.zeros(9))
    batches = iter(torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork"))
    (worker,) = batches._workers  # type: ignore[attr-defined]
    until(lambda: Path(f"/proc/{worker.pid}/comm").read_text() == "pt_data_worker\n", 5.0)
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0
