"""What we rely on in ipyparallel, ipykernel, IPython and torch that they do not promise.

One test for each private name, or unwritten fact, that gpupool uses. If one fails after an upgrade,
the file that it names has to change.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from multiprocessing import Process
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from botocore.credentials import create_credential_resolver
from botocore.session import Session
from ipyparallel.controller.app import IPController
from IPython.core.interactiveshell import InteractiveShell

from gpupool import Pool
from gpupool.pool.engines.client import plain_client
from tests.servers.issuer import Issuer
from tests.support.processes import folder_of, until

TIMEOUT_S = 60.0


@pytest.fixture
def client(pool2: Pool) -> Iterator[Any]:
    """ipyparallel's own client, beside the pool's: its engines are ordinary ones."""
    file = folder_of(pool2) / "profile" / "security" / "ipcontroller-client.json"
    client = plain_client(file)
    yield client
    client.close(linger=0)


def forty_two() -> int:
    print("asked")
    return 42


def request(client: Any, rank: int, hook: Any = None) -> Any:
    return client.send_apply_request(
        client._mux_stream,
        forty_two,
        ident=client._engines[rank].encode(),
        message_future_hook=hook,
    )


def test_the_controller_only_sleeps_by_its_time_and_finds_its_heart_monitor_by_name() -> None:
    """`app.time`, `heartmonitor.HeartMonitor`, its `caller`: host/controller.py."""
    from ipyparallel.controller import app, heartmonitor

    assert re.findall(r"\btime\.\w+", inspect.getsource(app)) == ["time.sleep"]
    assert "= HeartMonitor(" in inspect.getsource(heartmonitor._setup_heartmonitor)
    assert "self.caller = ioloop.PeriodicCallback(" in inspect.getsource(
        heartmonitor.HeartMonitor.start
    )
    assert {"hearts", "responses", "lifetime", "period"} <= set(dir(heartmonitor.HeartMonitor))


def test_an_engine_does_without_debugpy_which_a_cell_may_import(pool2: Pool) -> None:
    """That ipykernel's debugger may be missing: engine/boot.py."""
    script = (
        "from ipykernel import debugger as d\nimport debugpy\n(d._is_debugpy_available, debugpy)"
    )
    flags = [pool2.run(script)[rank][0] for rank in (0, 1)]
    assert flags == [False, False]


def test_the_hook_is_called_before_sending_and_callbacks_hear_all_output(client: Any) -> None:
    """`message_future_hook`, `iopub_callbacks` and `output`, in pool/engines/client.py."""
    heard: list[str] = []
    hooked: list[Any] = []

    def hook(message: Any) -> None:
        hooked.append(message)
        message.iopub_callbacks.append(lambda msg: heard.append(msg["header"]["msg_type"]))

    message = request(client, 0, hook)
    assert hooked == [message]
    assert message.result(TIMEOUT_S) == 42  # this and the output come by different ways
    message.output.result(TIMEOUT_S)  # resolves after the last output
    assert "stream" in heard


def test_a_control_request_reaches_its_handler_while_the_main_thread_is_busy(
    pool2: Pool, client: Any
) -> None:
    """`_send`, `_control_stream` and `kernel.control_handlers`, in client.py and control.py."""

    def install() -> None:
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()

        shell.user_ns["heard"] = heard = []

        def handler(stream: Any, ident: Any, parent: Any) -> None:
            heard.append(threading.current_thread() is threading.main_thread())
            kernel.session.send(stream, "test_reply", {"status": "ok"}, parent=parent, ident=ident)

        kernel = shell.kernel
        kernel.control_handlers["test_request"] = handler

    pool2.run(install)
    busy = "import time\nfor _ in range(1000):\n    if heard: break\n    time.sleep(0.01)\nheard"
    execution = pool2.begin(busy, ranks=(0,), on_output=lambda *_: None)
    client._send(
        client._control_stream, "test_request", content={}, ident=client._engines[0].encode()
    )
    assert execution.result()[0].text == "[False]"


def test_the_controllers_heartbeat_is_a_process_that_has_not_begun() -> None:
    """`host/controller.py` has a thread call the same with the same."""
    made = inspect.getsource(IPController.init_hub)
    assert re.search(r"self\.heartmonitor_process = Process\(\s*target=.*kwargs=dict\(", made, re.S)
    assert "self.heartmonitor_process.start()" in inspect.getsource(IPController.start)
    process = Process(target=forty_two, kwargs={"a": 1})
    assert (process._target, process._kwargs) == (forty_two, {"a": 1})  # type: ignore[attr-defined]


def test_a_debugger_takes_one_command_at_a_time(pool2: Pool) -> None:
    """`reset`, `setup`, `stack`, `curindex`, `cmdqueue` of IPython's Pdb: engine/cells/debug.py."""

    def driven() -> list[object]:
        import io

        from IPython.core.debugger import Pdb

        said = io.StringIO()
        try:
            raise ValueError
        except ValueError as error:
            debugger = Pdb(stdin=io.StringIO(), stdout=said)
            debugger.reset()
            debugger.setup(None, error.__traceback__)
        debugger.print_stack_entry(debugger.stack[debugger.curindex])
        debugger.cmdqueue = []
        stops = [debugger.onecmd(debugger.precmd(line)) for line in ("p 6 * 7 ;; up", "q")]
        return ["driven" in said.getvalue(), "42" in said.getvalue(), debugger.cmdqueue, *stops]

    assert pool2.run(driven, ranks=0)[0] == [True, True, ["up"], None, 1]


def test_the_kernel_turns_descriptor_2_into_a_pipe_to_itself(pool2: Pool) -> None:
    """Why engine/boot.py gives faulthandler a duplicate of the log's descriptor."""
    assert str(pool2.run("import os; os.readlink('/proc/self/fd/2')")[0]).startswith("pipe:")


def test_the_kernel_echoes_through_a_descriptor_that_can_be_replaced(pool2: Pool) -> None:
    """`_original_stdstream_copy`, in engine/output/log.py."""
    code = "import os, sys; os.readlink(f'/proc/self/fd/{sys.STREAM._original_stdstream_copy}')"
    for stream in ("stdout", "stderr"):
        targets = pool2.run(code.replace("STREAM", stream))
        assert all(target.startswith("pipe:") for target in targets.values())
    pool2.run("os.write(1, b'to descriptor 1\\n'); os.write(2, b'to descriptor 2\\n')")
    until(lambda: {"to descriptor 1", "to descriptor 2"} <= set(pool2.log(1).splitlines()), 5)


def test_torch_lists_its_process_groups_and_they_can_be_aborted(pool2: Pool) -> None:
    """`distributed_c10d._world.pg_map` and `ProcessGroup.abort`, in engine/group/abort.py."""
    code = (
        "from torch.distributed import distributed_c10d\n"
        "groups = list(distributed_c10d._world.pg_map)\n"
        "dist.group.WORLD in groups, all(callable(group.abort) for group in groups)"
    )
    assert pool2.run(code)[0] == (True, True)


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


def test_torch_names_groups_and_lists_their_ranks(pool2: Pool) -> None:
    """`_world.pg_names` and `_world.pg_group_ranks`, in engine/group/location.py."""
    code = (
        "from torch.distributed import distributed_c10d as c\n"
        "c._world.pg_names[dist.group.WORLD], sorted(c._world.pg_group_ranks[dist.group.WORLD])"
    )
    assert dict(pool2.run(code)) == {0: ("0", [0, 1]), 1: ("0", [0, 1])}


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
    """`_expiry_time`, in data/stores/s3_keys.py and pool/environment/credentials.py."""
    os.environ.update(Issuer(tmp_path, lifetime_s=3600).env)
    session = Session()
    found = [create_credential_resolver(session).load_credentials() for _ in range(2)]
    assert found[0].get_frozen_credentials() != found[1].get_frozen_credentials()
    left = found[1]._expiry_time - datetime.now(UTC)
    assert 3500 < left.total_seconds() < 3600


def test_asyncio_runs_a_second_loop_in_a_thread_while_the_first_is_hidden() -> None:
    # top-level await in a cell that the process's own loop is running
    async def inner() -> int:
        await asyncio.sleep(0)
        return 5

    async def outer() -> tuple[int, bool]:
        mine = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                value = runner.get_loop().run_until_complete(inner())
        finally:
            asyncio._set_running_loop(mine)
        await asyncio.sleep(0.001)
        return value, asyncio.get_running_loop() is mine

    assert asyncio.run(outer()) == (5, True)


def test_ipython_shows_every_error_through_methods_that_a_shell_can_replace() -> None:
    for name in ("showtraceback", "_showtraceback"):
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
    lookup = cloudpickle.cloudpickle._lookup_module_and_qualname
    assert lookup(made, "Made") is None
    assert lookup(made, "") is None
    assert lookup(io.BytesIO, "BytesIO") == (sys.modules["_io"], "BytesIO")


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
