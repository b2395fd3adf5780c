"""A pool, cells and trainings where there is no front end: a real terminal, and a pipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

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
import os, time
from gpupool.core.progress import progress
print('\\x1b[31mred\\x1b[0m')
with progress('Listing', unit='files') as bar:
    while bar._drawing is None and rank == 0:
        time.sleep(0.01)
    bar.update(11)
    while not os.path.exists(os.environ['LISTING']):
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
    "stop": "%gpupool stop",
}


def shown(folder: Path, is_terminal: bool) -> dict[str, str]:
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "IPYTHONDIR": str(folder)}
    env.pop("NO_COLOR", None)
    seen = folder / "seen"
    env["LISTING"] = str(seen)
    args = ["-c", SHELL, json.dumps(list(CELLS.values()))]
    if is_terminal:
        child = pexpect.spawn(
            sys.executable, args, env=env, encoding="utf8", dimensions=(30, 160), timeout=150
        )
        child.expect(r"Listing: 11 files \[00:")
        text = child.before + child.after
        seen.touch()
        child.expect(pexpect.EOF)
        child.wait()  # close() gives a process that is slow to end a tenth of a second
        child.close()
        text = (text + child.before).replace("\r\n", "\n")
    else:  # where nothing of it is to be seen
        seen.touch()
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        text = subprocess.run([sys.executable, *args], env=env, text=True, **ends).stdout
    _, *parts = text.split(">>>\n")
    assert len(parts) == len(CELLS), text
    return dict(zip(CELLS, parts, strict=True))


@pytest.mark.long
def test_a_terminal_draws_lines_and_leaves_none(tmp_path: Path) -> None:
    cells = shown(tmp_path, is_terminal=True)
    drawn = cells["list"].split("\r")
    assert any(piece.startswith("Listing: ") and " files [00:" in piece for piece in drawn)
    # (said twice if one rank says it half a second later)
    assert re.search(r"\[0(, 1)?\] \x1b\[31mred\x1b\[0m\n", cells["list"])
    train = cells["train"].split("\r")
    assert any("(Ctrl-C: stop and keep)" in piece for piece in train)
    assert {"[0, 1] half of it\n", "[0] half of it\n"} & {*train}  # on a line of its own
    assert train[-1].startswith("finished  epoch 3/3  step 180/180  loss ")
    for name in ("start", "list", "stop"):  # what was drawn is wiped
        assert not cells[name].split("\r")[-1].startswith(("Start", "List", "Stop"))


@pytest.mark.long
def test_nothing_moves_and_nothing_is_coloured_elsewhere(tmp_path: Path) -> None:
    cells = shown(tmp_path, is_terminal=False)
    text = "".join(cells.values())
    assert "\x1b" not in text
    assert "\r" not in text
    assert (cells["load"], cells["start"]) == ("", "")
    assert re.fullmatch(r"\[0, 1\] red\n|(\[\d\] red\n){2}", cells["list"])
    assert "SpmdError: rank 1: ZeroDivisionError: division by zero" in cells["fail"]
    train = [line for line in cells["train"].splitlines() if not line.endswith("] half of it")]
    assert {line.split("  ")[0] for line in train} == {"training", "finished"}
    assert len([line for line in train if " val " in line]) >= 3
    assert cells["stop"] == "Pool stopped.\n"
