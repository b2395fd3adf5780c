"""Scripts written for torchrun, pasted as they are into cells of a real notebook."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernel import Kernel
from tests.support.raising import frames_of_ours

SCRIPTS = Path(__file__).parent / "scripts"
SUM = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with a pool of two ranks; every test leaves it usable."""
    with Kernel() as kernel:
        kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2")
        yield kernel


def lines(kernel: Kernel, cell: str) -> list[str]:
    """What a cell on the ranks shows, warnings of libraries aside."""
    done = kernel.run(f"%%spmd\nimport warnings; warnings.simplefilter('ignore')\n{cell}")
    assert done.errors == [], done.error_text
    return [line.strip() for line in done.text.splitlines() if line.strip()]


def usable(kernel: Kernel) -> bool:
    return kernel.run(f"%%spmd\n{SUM}").text == "[0, 1] 2.0"


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("ddp_tutorial", ["[0, 1] epoch 1, steps 4", "weights 1.058619"]),
        ("explicit_init", ["[0, 1] total 3.0 2", "initialized False"]),
        ("fsdp_checkpoint", ["[0, 1] DTensor (8, 8) (4, 8)", "loaded True"]),
        ("device_mesh", ["[0, 1] 2 (4,) 28.0"]),
        pytest.param("fabric_loop", ["[0, 1] DDPStrategy 2 8", "1.0"], marks=pytest.mark.long),
        (
            "accelerate_loop",
            [
                "[0] DistributedDataParallel 2 8 (2,)",
                "said by the main process",
                "[1] DistributedDataParallel 2 8 (2,)",
            ],
        ),
    ],
)
def test_a_script_for_torchrun_runs_as_it_is_and_again(
    kernel: Kernel, script: str, shown: list[str]
) -> None:
    library = {"fabric_loop": "lightning_fabric", "accelerate_loop": "accelerate"}.get(script)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    source = (SCRIPTS / f"{script}.py").read_text()
    for _ in range(2):
        assert lines(kernel, source) == shown
        assert usable(kernel)


def test_a_scripts_main_can_be_called_twice(kernel: Kernel) -> None:
    source = (SCRIPTS / "ddp_tutorial.py").read_text()
    again = f"{source}    main(args.total_epochs, args.batch_size)\n"
    assert lines(kernel, again)[-1] == "weights 1.058619"
    assert lines(kernel, again).count("weights 1.058619") == 2


def test_no_process_of_a_data_loader_is_left(kernel: Kernel) -> None:
    loading = (
        "import psutil, time\n"
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(8), num_workers=2, persistent_workers=True)\n"
        "print(sum(int(x) for _ in range(2) for x in loader))\n"
        "del loader\n"
        "deadline = time.monotonic() + 60\n"
        "while psutil.Process().children() and time.monotonic() < deadline: time.sleep(0.05)\n"
        "print(psutil.Process().children(recursive=True))"
    )
    assert lines(kernel, loading) == ["[0, 1] 56", "[]"]


@pytest.mark.long
def test_fabric_on_ranks_that_see_one_gpu_each_counts_them_as_nodes(kernel: Kernel) -> None:
    """The variables of a rank with a GPU, tried on the CPU."""
    pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")
    source = (SCRIPTS / "fabric_loop.py").read_text()
    pinned = source.replace("devices=2", "devices=1, num_nodes=2")
    cell = f"import os\nos.environ['LOCAL_RANK'] = '0'\n{pinned}"
    assert lines(kernel, cell) == ["[0, 1] DDPStrategy 2 8", "1.0"]
    kernel.run("%%spmd\nos.environ['LOCAL_RANK'] = str(local_rank)")


def test_a_spawn_says_what_to_do_instead(kernel: Kernel) -> None:
    cell = (
        "import torch.multiprocessing as mp\ndef worker(rank, n):\n    print(rank)\n"
        "if __name__ == '__main__':\n    mp.spawn(worker, args=(2,), nprocs=2)"
    )
    done = kernel.run(f"%%spmd\n{cell}")
    assert "call worker(rank, ...) instead, without spawn." in done.error_text
    assert not frames_of_ours(done.error_text)


def test_a_process_that_is_forked_runs(kernel: Kernel) -> None:
    cell = (
        "import torch.multiprocessing as mp\ndef work(queue):\n    queue.put(21 * 2)\n"
        "queue = mp.Queue()\nprocess = mp.Process(target=work, args=(queue,))\nprocess.start()\n"
        "print(queue.get())\nprocess.join()\nprint(process.exitcode)"
    )
    assert lines(kernel, cell) == ["[0, 1] 42", "0"]


def test_a_pool_of_processes_that_are_forked_ends(kernel: Kernel) -> None:
    """Each `with` block ends its workers by SIGTERM, at a moment of chance: so several."""
    kernel.run("def cube(x): return x ** 3")
    cell = (
        "import multiprocessing as mp, signal\nfork = mp.get_context('fork')\n"
        "for _ in range(5):\n    with fork.Pool(2) as pool:\n"
        "        assert pool.map(cube, range(5)) == [0, 1, 8, 27, 64]\n"
        "def wait(ready):\n    ready.set()\n    signal.pause()\n"
        "ready = fork.Event()\nprocess = fork.Process(target=wait, args=(ready,))\n"
        "process.start()\nready.wait()\nprocess.terminate()\nprocess.join()\n"
        "print(process.exitcode)"
    )
    assert lines(kernel, cell) == ["[0, 1] -15"]
    assert usable(kernel)


def test_a_process_that_is_spawned_knows_what_the_cell_defines(kernel: Kernel) -> None:
    cell = (
        "import multiprocessing as mp\nserver = mp.get_context('forkserver')\nfactor = 2\n"
        "class Job:\n    def __call__(self, queue): queue.put(times(21))\n"
        "def times(x): return x * factor\n"
        "queue = server.Queue()\nprocess = server.Process(target=Job(), args=(queue,))\n"
        "process.start()\nprint(queue.get())\nprocess.join()\nprint(process.exitcode)"
    )
    assert lines(kernel, cell) == ["[0, 1] 42", "0"]


def test_a_process_that_a_script_spawns_runs_the_script_again(
    kernel: Kernel, tmp_path: Path
) -> None:
    """What it defines need not be picklable, as in plain IPython."""
    script = (
        "import multiprocessing as mp, threading\nlock = threading.Lock()\n"
        "def work(queue, n):\n    with lock: queue.put(n * 2)\n"
        "if __name__ == '__main__':\n    spawn = mp.get_context('spawn')\n"
        "    queue = spawn.Queue()\n    process = spawn.Process(target=work, args=(queue, 21))\n"
        "    process.start()\n    print(queue.get(timeout=100))\n    process.join()\n"
    )
    (tmp_path / "script.py").write_text(script)
    assert lines(kernel, f"%run {tmp_path}/script.py") == ["[0, 1] 42"]


def test_rpc_can_be_shut_down_and_begun_again(kernel: Kernel) -> None:
    """torch itself hangs in the second shutdown, once there was a reference to a remote value."""
    cell = (
        "import torch.distributed.rpc as rpc\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\n"
        "if rank == 0:\n"
        "    seven = rpc.remote('worker1', max, args=(3, 7)); assert seven.to_here() == 7\n"
        "    del seven\nrpc.shutdown()\nprint('over')"
    )
    for _ in range(3):
        assert "over" in lines(kernel, cell)[-1]
        assert usable(kernel)
