"""What may happen on a rank while the others wait for it, by its real cause: nothing is lost.

Each has a deadline, and `Faulty.check` afterwards. Deaths are in `test_deaths.py`, ranks that do
not react in `test_hangs.py`. Shown elsewhere:

- the agent, the controller, the notebook's kernel or the Jupyter server is killed; the machine
  sleeps; a start is cut off; Stop while ranks do not react: `test_lifetime.py`
- disk full, ports taken, torch broken, no network: `test_start.py`
- a rank is restarted on demand, that restart cut off at any moment:
  `tests/pool/upkeep/test_restart.py`
- out of host memory: `tests/host/test_endings.py`, `test_out_of_memory.py`
- two pools want one GPU: `tests/core/machine/test_locks.py`, `tests/pool/processes/test_locking.py`
- floods of output, C code that prints, fork and threads that print:
  `tests/pool/calls/test_output.py`
- large values, values without a pickle: `tests/pool/variables/test_values.py`
- `exit()`, `sys.exit()`, `quit()`: `tests/pool/test_pool.py`
- strange exceptions: `tests/engine/cells/test_errors_shown.py`
- credentials that expire: `tests/pool/environment/test_renewal.py`
- secrets in output, argv, history and listeners: `tests/e2e/test_secrets.py`
- a group left or formed by one rank: `tests/engine/group/test_process_group.py`
- Stop and Ctrl-C in a kernel: `tests/notebook/magics/test_magics_kernel.py`
"""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from tests.faults.invariants import Faulty
from tests.support.processes import reach

DDP = """
from torch.nn.parallel import DistributedDataParallel
net = DistributedDataParallel(torch.nn.Linear(4, 4))
loss = net(torch.ones(2, 4)).sum()
"""
LOADER = """
import time
from torch.utils.data import DataLoader, Dataset
class Blocked(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(600)
"""
SERVER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
"""
# What the other ranks do: name -> (before it all ranks do this, what never ends by itself).
WAITS = {
    "all_reduce": ("", "dist.all_reduce(torch.ones(1))"),
    "wait": ("", "dist.all_reduce(torch.ones(1), async_op=True).wait()"),
    "recv": ("", "dist.recv(torch.ones(1), src=1)"),
    "all_gather_object": ("", "dist.all_gather_object([None] * world_size, {'rank': rank})"),
    "sub-group": ("sub = dist.new_group()", "dist.barrier(group=sub)"),
    "new_group": ("", "dist.new_group()"),
    "DDP backward": (DDP, "loss.backward()"),
    "DataLoader": (LOADER, "next(iter(DataLoader(Blocked(), num_workers=1)))"),
    "sleep": ("import time", "time.sleep(600)"),
    "busy loop": ("", "while True: pass"),
    "computing": ("m = torch.ones(200, 200)", "while True: m = m @ m"),
    "retry loop": (
        "import time",
        "while True:\n    try: time.sleep(600)\n    except Exception: pass",
    ),
    "collective in a retry loop": (
        "",
        "while True:\n    try: dist.all_reduce(torch.ones(1))\n    except Exception: pass",
    ),
    "socket read": (SERVER, "client.recv(1)"),
}


def cell(name: str, on_rank_1: str) -> str:
    """Rank 1 does something else than the others, which wait for it."""
    before, waits = WAITS[name]
    branches = (textwrap.indent(text, "    ") for text in (on_rank_1, waits))
    return "{}\nif rank == 1:\n{}\nelse:\n{}".format(before, *branches)


@pytest.mark.parametrize("name", WAITS)
def test_a_rank_raises_and_the_others_are_back(faulty: Faulty, name: str) -> None:
    error = faulty.fails(cell(name, "import time; time.sleep(0.3); raise ValueError('one')"))
    assert str(error).startswith("rank 1: ValueError: one")
    assert [rank for rank, other in error.errors.items() if other.freed] == [0, 2]
    faulty.check()


# the others through a real kernel: test_interrupt_kernel.py
@pytest.mark.parametrize("name", ["all_reduce", "new_group", "DDP backward", "recv"])
def test_stop_brings_all_ranks_back(faulty: Faulty, name: str) -> None:
    error = faulty.stopped(cell(name, "import time; time.sleep(600)"))
    assert {rank: one.ename for rank, one in error.errors.items()} == dict.fromkeys(
        range(3), "KeyboardInterrupt"
    )
    faulty.check()


MISMATCH = """
if rank == 0: dist.all_reduce(torch.ones(3))
elif rank == 1: dist.broadcast(torch.ones(3), src=0); dist.barrier(); dist.barrier()
else: dist.recv(torch.ones(3), src=1)
dist.barrier()
"""


def test_ranks_in_different_collectives_are_back_after_a_stop(faulty: Faulty) -> None:
    error = faulty.stopped(MISMATCH)
    assert error.first.ename == "KeyboardInterrupt"
    faulty.check()


def test_a_time_limit_brings_all_back(faulty: Faulty) -> None:
    error = faulty.fails(cell("all_reduce", "import time; time.sleep(600)"), timeout_s=0.5)
    assert "took longer than 0.5 s" in str(error)
    faulty.check()


def test_to_stop_again_and_again_is_to_stop_once(faulty: Faulty) -> None:
    execution = faulty.begun(cell("all_reduce", "import time; time.sleep(600)"))
    for _ in range(20):
        execution.interrupt()
        time.sleep(0.01)
    assert faulty.ended(execution).first.ename == "KeyboardInterrupt"
    execution.interrupt()  # and now that it is over
    faulty.pool.interrupt()
    faulty.check()


def test_a_stop_of_an_idle_pool_meets_no_later_cell(faulty: Faulty) -> None:
    for _ in range(20):
        execution = faulty.begin("1")
        assert execution.wait(10)
        execution.interrupt()
        faulty.pool.interrupt()
        assert dict(faulty.pool.run("rank")) == {0: 0, 1: 1, 2: 2}
    faulty.check()


def test_ranks_that_are_about_to_finish_may(faulty: Faulty, tmp_path: Path) -> None:
    """A quarter of a second is all they have: they may be too slow for it once, but not always."""
    for number in range(20):
        both = [str(tmp_path / f"{number}-{rank}") for rank in (0, 2)]
        error = faulty.fails(
            "import os, time\nif rank == 1:\n"
            f"    while not all(map(os.path.exists, {both})): time.sleep(0.001)\n"
            "    raise ValueError('one')\n"
            f"{reach(tmp_path / f'{number}-')}; time.sleep(0.05); kept = 10 + rank"
        )
        if list(error.errors) == [1]:
            break
    assert list(error.errors) == [1]
    faulty.check()


def test_ranks_that_all_compute_are_interrupted(faulty: Faulty) -> None:
    error = faulty.stopped("while True: pass")
    assert {one.ename for one in error.errors.values()} == {"KeyboardInterrupt"}
    faulty.check()


TRAIN = """
torch.manual_seed(0)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.full((2, 4), float(rank))).square().sum().backward()
    optimizer.step()
[p.detach().sum().item() for p in net.parameters()]
"""


def test_a_model_goes_on_training_after_an_abort_in_its_backward(faulty: Faulty) -> None:
    make = DDP.replace("loss = ", "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\nloss = ")
    faulty.pool.run(make + TRAIN)
    faulty.fails("loss = net(torch.ones(2, 4)).sum()\nif rank == 1: 1 / 0\nloss.backward()")
    if faulty.pool.run("hasattr(torch.distributed, '_reconfigure')")[0]:
        again = TRAIN
    else:  # the wrapper's group is gone
        error = faulty.fails(TRAIN)
        assert "rap" in str(error)  # "wrap again"
        again = "net = DistributedDataParallel(net.module)\n" + TRAIN
    values = faulty.pool.run(again, timeout_s=30)
    assert values[0] == values[1] == values[2]
    faulty.check()
