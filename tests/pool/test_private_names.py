"""What we rely on in ipyparallel, ipykernel, IPython and torch that they do not promise.

One test for each private name, or unwritten fact, that gpupool uses. If one fails after an upgrade,
the file that it names has to change.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from datetime import UTC, datetime
from functools import partial
from multiprocessing import Process
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from botocore.credentials import create_credential_resolver
from botocore.session import Session
from ipyparallel.controller.app import IPController
from IPython.core.interactiveshell import InteractiveShell

from gpupool import Pool
from gpupool.core.wire.masking import MASK
from tests.servers.issuer import Issuer
from tests.support.processes import until

TIMEOUT_S = 60.0


def forty_two() -> int:
    return 42


def test_the_controller_only_sleeps_by_its_time_and_finds_its_heart_monitor_by_name() -> None:
    """`app.time`, `heartmonitor.HeartMonitor`, its `caller`: host/controller.py."""
    from ipyparallel.controller import app, heartmonitor

    assert re.findall(r"\btime\.\w+", inspect.getsource(app)) == ["time.sleep"]
    assert "= HeartMonitor(" in inspect.getsource(heartmonitor._setup_heartmonitor)
    assert "self.caller = ioloop.PeriodicCallback(" in inspect.getsource(
        heartmonitor.HeartMonitor.start
    )
    assert {"hearts", "responses", "lifetime", "period"} <= set(dir(heartmonitor.HeartMonitor))


def test_the_controllers_heartbeat_is_a_process_that_has_not_begun() -> None:
    """`host/controller.py` has a thread call the same with the same."""
    made = inspect.getsource(IPController.init_hub)
    assert re.search(r"self\.heartmonitor_process = Process\(\s*target=.*kwargs=dict\(", made, re.S)
    assert "self.heartmonitor_process.start()" in inspect.getsource(IPController.start)
    process = Process(target=forty_two, kwargs={"a": 1})
    assert (process._target, process._kwargs) == (forty_two, {"a": 1})  # type: ignore[attr-defined]


def test_what_is_written_to_descriptors_and_what_the_kernel_logs_is_masked_in_the_log(
    pool2: Pool,
) -> None:
    """`_original_stdstream_copy`, the handlers of `kernel.log`, in engine/output/streams.py."""
    pool2.run(
        "import os\nfrom gpupool.engine.output import streams\n"
        "streams.secrets.add(['h1dd3n-w0rd'])\n"
        "get_ipython().kernel.log.error('kernel h1dd3n-w0rd')\n"
        "os.write(1, b'stdout h1dd3n-w0rd\\n'); os.write(2, b'stderr h1dd3n-w0rd\\n')"
    )
    expected = {f"{name} {MASK}" for name in ("stdout", "stderr", "kernel")}
    until(lambda: expected <= {*pool2._all_ranks.engines.log(1).splitlines()}, 10.0)


def test_the_flight_recorder_knows_gloos_collectives_and_which_are_pending(pool2: Pool) -> None:
    """`_dump_fr_trace_json` and its keys, in engine/group/location.py."""

    def recorded() -> list[object]:
        import json
        import time

        import torch
        import torch.distributed as dist
        from torch._C import _distributed_c10d as c10d

        def newest(dump: dict[str, dict[str, dict[str, str]]]) -> dict[str, str]:
            # by the number of groups made before, which is not the group's name
            return dump["pg_status"][max(dump["pg_status"], key=int)]

        def num_pending(status: dict[str, str]) -> int:
            return int(status["last_enqueued_collective"]) - int(
                status["last_completed_collective"]
            )

        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # it is counted as over a moment after it has returned
            counts = json.loads(c10d._dump_fr_trace_json(False, False))
            if not num_pending(newest(counts)):
                break
            time.sleep(0.001)
        before = time.time_ns()
        if dist.get_rank() == 1:
            store.wait(["rank 0 has looked"])
        work = dist.all_reduce(torch.ones(4), async_op=True)
        found: list[object] = []
        if dist.get_rank() == 0:
            counts = json.loads(c10d._dump_fr_trace_json(False, False))
            dump = json.loads(c10d._dump_fr_trace_json(True, False))
            status, entry = newest(dump), dump["entries"][-1]
            keys = ("profiling_name", "is_p2p", "retired", "input_sizes", "input_dtypes")
            found = [
                counts["pg_status"] == dump["pg_status"],
                "entries" in counts,
                num_pending(status),
                entry["collective_seq_id"] == int(status["last_enqueued_collective"]),
                before <= entry["time_created_ns"] <= time.time_ns(),
                isinstance(entry["p2p_seq_id"], int),
                entry["process_group"][0],
                *(entry[key] for key in keys),
            ]
            store.set("rank 0 has looked", "")
        work.wait()
        return found

    facts = [True, False, 1, True, True, True, "0"]
    entry = ["gloo:all_reduce", False, False, [[4]], ["Float"]]
    assert pool2.run(recorded)[0] == facts + entry


def test_public_functions_of_torch_distributed_are_in_one_file(pool2: Pool) -> None:
    """Found by it in the stack, with variables `src`, `dst` and `group`, in location.py."""
    code = (
        "import inspect\nfrom torch.distributed import distributed_c10d as c\n"
        "names = 'all_reduce recv send isend irecv monitored_barrier all_gather_object'.split()\n"
        "[inspect.unwrap(getattr(c, n)).__code__.co_filename == c.__file__ for n in names], "
        "{'src', 'group', 'group_src'} <= {*inspect.signature(c.recv).parameters}, "
        "{'dst', 'group', 'group_dst'} <= {*inspect.signature(c.send).parameters}"
    )
    assert pool2.run(code)[0] == ([True] * 7, True, True)


def test_a_client_that_has_missed_the_notifications_asks_for_the_engines(pool2: Pool) -> None:
    """`_update_engines`, `_send` and `_query_stream`, in pool/engines/client.py."""
    client: Any = pool2._all_ranks.engines._client
    theirs = client._client
    engines = dict(theirs._engines)
    theirs._ids.clear()
    theirs._engines.clear()
    assert client.ranks == []
    client.ask_for_engines()
    until(lambda: client.ranks == [0, 1], TIMEOUT_S)
    assert dict(theirs._engines) == engines
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}


def test_botocore_keeps_the_end_of_credentials_under_a_private_name(tmp_path: Path) -> None:
    """`_expiry_time`, in data/stores/s3.py and pool/environment/credentials.py."""
    os.environ.update(Issuer(tmp_path, lifetime_s=3600).env)
    session = Session()
    found = [create_credential_resolver(session).load_credentials() for _ in range(2)]
    assert found[0].get_frozen_credentials() != found[1].get_frozen_credentials()
    left = found[1]._expiry_time - datetime.now(UTC)
    assert 3500 < left.total_seconds() < 3600


def test_ipython_shows_every_error_through_methods_that_a_shell_can_replace() -> None:
    for name in ("showtraceback", "_showtraceback", "_run_cell", "run_cell_async", "run_code"):
        assert callable(getattr(InteractiveShell, name))
    assert inspect.getsource(InteractiveShell.showsyntaxerror).count("self._showtraceback") == 1


def test_cloudpickle_reduces_a_function_to_its_code_globals_and_state() -> None:
    """gpupool/core/wire/pickles.py puts the cells' namespace in the place of the globals."""
    pickler = cloudpickle.Pickler(io.BytesIO(), protocol=5)
    make, arguments, state, *rest = pickler._dynamic_function_reduce(forty_two)
    assert make.__name__ == "_make_function"
    assert arguments[:2] == (forty_two.__code__, {"__name__": __name__, **arguments[1]})
    assert set(state[1]) >= {"__globals__", "__closure__", "__name__"}
    assert rest[:2] == [None, None]


def test_cloudpickle_makes_a_class_empty_and_knows_it_again() -> None:
    """gpupool/core/wire/reductions.py gives the class its whole name, and says who makes it."""
    made = type("Made", (), {"__module__": "__main__", "x": 1})
    pickler = cloudpickle.Pickler(io.BytesIO(), protocol=5)
    make, (meta, name, bases, names, tracker, extra), *_ = pickler.reducer_override(made)
    assert make is cloudpickle.cloudpickle._make_skeleton_class
    assert (meta, name, bases, names, extra) == (type, "Made", (object,), NAMES, None)
    assert make(partial(type.__new__, meta), name, bases, names, tracker, extra) is made


NAMES = {"__module__": "__main__"}


def test_a_compiled_function_closes_over_the_function_and_how_it_is_compiled() -> None:
    """gpupool/core/wire/reductions.py has a rank compile it again."""
    made = torch.compile(forty_two, backend="eager", dynamic=True, fullgraph=True)
    eval_frame: Any = sys.modules["torch._dynamo.eval_frame"]
    assert made.__code__.co_filename == eval_frame.__file__  # type: ignore[attr-defined]
    names = inspect.getclosurevars(made).nonlocals
    assert names["fn"] is forty_two
    assert isinstance(names["self"], eval_frame.OptimizeContext)
    assert (names["self"]._dynamic, names["self"].fullgraph) == (True, True)
    assert eval_frame.innermost_backend(names["self"].callback).compiler_name == "eager"


def test_torch_pickles_a_tensor_as_its_storage() -> None:
    """gpupool/core/wire/pickles.py lets the storage's memory stand beside the pickle."""
    tensor = torch.arange(6, dtype=torch.int16)[2:]
    rebuild, (storage, offset, *_) = tensor.__reduce_ex__(5)
    assert isinstance(storage, torch.storage.TypedStorage)
    assert storage._untyped_storage.data_ptr() == tensor.untyped_storage().data_ptr()
    again = torch.storage.TypedStorage(
        wrap_storage=storage._untyped_storage, dtype=torch.int16, _internal=True
    )
    assert torch.equal(rebuild(again, offset, (4,), (1,), False, {}), tensor)


def test_ddp_makes_its_reducer_of_its_state_and_keeps_the_hooks(pool2: Pool) -> None:
    """`_comm_hooks`, `_register_comm_hook`, a static graph: engine/group/ddp_replicas.py."""
    source = """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(1, 1), static_graph=True)
hook = lambda state, bucket: None
model.register_comm_hook("state", hook)
learnt = [vars(model).get("_static_graph_delay_allreduce_enqueued")]
del model.reducer, model.logger
state = {k: v for k, v in vars(model).items() if k != "process_group"}
del model.process_group
model.__setstate__(state)
facts = [learnt, model._comm_hooks == [(hook, "state")], "reducer" in vars(model)]
dist._register_comm_hook(model.reducer, "state", hook)
facts + [model.process_group is dist.group.WORLD]
"""
    assert pool2.run(source)[0] == [[False], True, True, True]


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
