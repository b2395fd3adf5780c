"""What a walk has ranks do: output, processes, groups, trainings, and a second notebook."""

from __future__ import annotations

import signal
import textwrap

from tests.chaos.walk import NUMBERS, Walk, at
from tests.support.processes import gone, until

TRAINING = """
import hashlib, time, torch
class _Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep({pause_s})
        return super().forward(x)
def _train(**options):
    torch.manual_seed(7)
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.arange(96) % 4)
    options = gpupool.TrainingOptions(
        epochs={epochs}, batch_size=24, seed=1, lr=0.01, progress="none", **options
    )
    return gpupool.train(_Slow(8, 4), data, options=options)
def _digest(result):
    weights = (bytes(w.numpy()) for w in result.model.state_dict().values())
    return result.stopped_by, hashlib.sha256(b"".join(weights)).hexdigest()
"""

BREAKS = (  # of the standard streams; the next cell has them back
    "import sys; sys.stdout = None",
    "import sys; sys.stderr = None",
    "import sys\nclass _Tee:\n    def write(self, text): return len(text)\nsys.stdout = _Tee()",
    "import sys\nwith open('/dev/null', 'w') as _file: sys.stdout = _file",
    "import sys; sys.stdout.close()",
    "import os; os.close(1)",
    "import os, sys; os.dup2(2, 1); sys.stdout.close()",
)


def flood(walk: Walk) -> None:
    count = walk.random.choice((2_000, 20_000))
    cell = walk.cell(f"for _i in range({count}): print(rank, _i, 'x' * 50)\nprint('end of', rank)")
    for rank in range(walk.world_size):
        assert f"end of {rank}" in cell.text


def start_children(walk: Walk) -> None:
    """Which end by the cell that has started them, or with their rank."""
    started = walk.cell(
        "import os, subprocess, time\n"
        "_child = subprocess.Popen(['sleep', '600'])\n"
        "_forked = os.fork()\nif not _forked:\n    time.sleep(600)\n    os._exit(0)\n"
        "print(f'children: {_child.pid} {_forked}')"
    )
    pids = [
        line.split("children: ")[1] for line in started.text.splitlines() if "children:" in line
    ]
    children = {int(pid) for two in pids for pid in two.split()}
    assert len(children) == 2 * walk.world_size, started.text
    if walk.random.random() < 0.5:
        rank = walk.random.randrange(walk.world_size)
        walk.doing += f", kill {rank}"
        walk.signal(signal.SIGKILL, f"rank {rank}")
        walk.lose(rank)
        walk.works()
    walk.cell(
        "import os, signal\nif '_child' in globals():\n    _child.kill(); _child.wait()\n"
        "    os.kill(_forked, signal.SIGKILL); os.waitpid(_forked, 0)\n    del _child"
    )
    until(lambda: gone(*children), 3.0, f"the end of {children}")


def use_subgroup(walk: Walk) -> None:
    """One of the ranks 0 and 1."""
    cell = walk.cell(
        "_sub, _ones = dist.new_group([0, 1]), torch.ones(1)\n"
        "if rank < 2: dist.all_reduce(_ones, group=_sub); dist.destroy_process_group(_sub)\n"
        "print('part', _ones.item())"
    )
    assert "part 2.0" in cell.text, cell.text


def break_stdout(walk: Walk) -> None:
    """On one rank or all: it costs that cell's output at most."""
    how, ranks = walk.random.choice(BREAKS), walk.some_ranks()
    name, value = walk.random.choice(NUMBERS), walk.value()
    walk.doing += f": {how!r} on {ranks}"
    walk.cell(f"{name} = {value} + rank\nif rank in {ranks}:\n{textwrap.indent(how, '    ')}")
    walk.model.run(f"{name} = {value} + rank", assigns=name)
    shown = walk.cell("print('shown by', rank)\nimport os; _ = os.system(f'echo echo of {rank}')")
    for rank in range(walk.world_size):
        assert f"shown by {rank}" in shown.text, shown.text
        assert f"echo of {rank}" in shown.text, shown.text


def train(walk: Walk) -> None:
    """The same one all along gives the same bits, a rank killed in the middle or not."""
    is_killed, folder = walk.random.random() < 0.5, walk.folder / f"checkpoints{walk.number}"
    options = f"checkpoint={str(folder)!r}, checkpoint_every=2, on_failure='resume'"
    walk.here(TRAINING.format(pause_s=0.05 if is_killed else 0.0, epochs=4))
    rank = walk.random.randrange(walk.world_size)
    walk.doing += f", kill {rank}" if is_killed else ""
    has_saved = lambda cell: any(folder.glob("**/step-*"))  # noqa: E731
    kill = (has_saved, lambda: walk.signal(signal.SIGKILL, f"rank {rank}"))
    cell = walk.kernel.run(
        f"print(*_digest(_train({options if is_killed else ''})))",
        meanwhile=[kill] if is_killed else [],
    )
    assert cell.status == "ok", cell.errors
    if is_killed:
        walk.lose(rank)
    end, digest = cell.text.splitlines()[-1].split()
    assert end == "epochs"
    expected = walk.references.setdefault(("training", walk.world_size), digest)
    assert digest == expected, "the training has other bits"


def stop_training(walk: Walk) -> None:
    walk.here(TRAINING.format(pause_s=0.05, epochs=1000))
    cell = walk.kernel.run("print(*_digest(_train()))", meanwhile=[at(1.0, walk.kernel.press_stop)])
    assert cell.text.splitlines()[-1].startswith("user "), (cell.text, cell.errors)


def second_notebook(walk: Walk) -> None:
    """Opened, or killed: neither meets the other."""
    if walk.other is not None:
        walk.doing += ": killed"
        walk.close_other()
        return
    walk.doing += ": opened"
    kernel, notebook = walk.open(f"other{walk.number}")
    kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 1")
    assert kernel.run("%%spmd\nkept = 7").status == "ok"
    walk.other = kernel, notebook
