"""A pool, cells and trainings where there is no front end: a real terminal, a dumb one, a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from gpupool.core.terminal import FRESH_LINE

SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("colors", "NoColor")  # those of IPython; ours are asked about here
for cell in json.loads(sys.argv[1]):
    print(">>>", flush=True)
    shell.run_cell(cell, store_history=True)
"""
CELLS = {
    "load": "%load_ext gpupool",
    "start": "import gpupool; pool = gpupool.start(n=2, device='cpu')",
    "list": """%%spmd
import time
from gpupool.core.progress import progress
print('\\x1b[31mred\\x1b[0m')
with progress('Listing', unit='files') as bar:
    while not bar.is_drawn and rank == 0:
        time.sleep(0.01)
    for done in range(12):
        bar.update(done)
        time.sleep(0.1)
""",
    "fail": "%%spmd\n1 / (rank - 1)",
    "train": """
import torch
from torch.utils.data import TensorDataset
inputs = torch.randn(6000, 8)
data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
network = torch.nn.Linear(8, 2)
def say(info):
    import time
    time.sleep(0.005)  # so that the line is drawn some times
    if info.step == 90:
        print("half of it")
options = gpupool.TrainingOptions(epochs=3, batch_size=100, callbacks=[say])
result = gpupool.train(network, data, options=options, validation=data)
""",
    "predict": """
class Slow(torch.nn.Linear):
    def forward(self, inputs):
        import time
        time.sleep(0.03)
        return super().forward(inputs)
outputs = gpupool.predict(Slow(8, 2), data, batch_size=120)
""",
    "stop": "%gpupool stop",
}


def shown(kind: str, folder: Path) -> dict[str, str]:
    """What each cell writes, stdout and stderr as they come, into this kind of terminal."""
    term = {"terminal": "xterm-256color", "dumb": "dumb", "pipe": "xterm-256color"}[kind]
    env = {**os.environ, "TERM": term, "COLUMNS": "160", "IPYTHONDIR": str(folder)}
    env.pop("NO_COLOR", None)
    args = ["-c", SHELL, json.dumps(list(CELLS.values()))]
    if kind == "pipe":
        done = subprocess.run(
            [sys.executable, *args],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )
        text = done.stdout
    else:
        child = pexpect.spawn(
            sys.executable, args, env=env, encoding="utf8", dimensions=(30, 160), timeout=150
        )
        child.expect(pexpect.EOF)
        child.close()
        text = child.before.replace("\r\n", "\n")
    _, *parts = text.split(">>>\n")
    assert len(parts) == len(CELLS), text
    return dict(zip(CELLS, parts, strict=True))


def test_a_terminal_draws_lines_and_leaves_none(tmp_path: Path) -> None:
    cells = shown("terminal", tmp_path)
    drawn = cells["list"].split(FRESH_LINE)
    assert any(piece.startswith("Listing: ") and " files [00:0" in piece for piece in drawn)
    assert "[0, 1] \x1b[31mred\x1b[0m\n" in cells["list"]
    train = cells["train"].split(FRESH_LINE)
    assert any(piece.endswith("(Ctrl-C: stop and keep)") for piece in train)
    assert "[0, 1] half of it\n" in train  # on a line of its own
    assert train[-1].startswith("finished  epoch 3/3  step 180/180  loss ")
    predict = cells["predict"].split(FRESH_LINE)
    assert any(" of 6,000 samples [00:0" in piece for piece in predict)
    for name in ("start", "list", "predict", "stop"):  # what was drawn is wiped
        assert not cells[name].split(FRESH_LINE)[-1].startswith(("Start", "List", "Pred", "Stop"))


@pytest.mark.parametrize("kind", ["pipe", pytest.param("dumb", marks=pytest.mark.long)])
def test_nothing_moves_and_nothing_is_coloured_elsewhere(kind: str, tmp_path: Path) -> None:
    cells = shown(kind, tmp_path)
    text = "".join(cells.values())
    assert "\x1b" not in text
    assert "\r" not in text
    assert (cells["load"], cells["start"], cells["predict"]) == ("", "", "")
    assert cells["list"].startswith("[0, 1] red\n%%spmd  2 ranks  ok  ")
    assert "SpmdError: rank 1: ZeroDivisionError: division by zero" in cells["fail"]
    train = [line for line in cells["train"].splitlines() if line != "[0, 1] half of it"]
    assert {line.split("  ")[0] for line in train} == {"training", "finished"}
    assert len([line for line in train if " val " in line]) >= 3
    assert cells["stop"] == "Pool stopped.\n"
