"""A module of the user's that the notebook has loaded again is loaded again on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.terminal import Terminal

# Of another length each time: two edits within a second leave the compiled file alone else.
MODULE = """
from torch import nn
def value(): return {0}
class Scale:
    factor = {0}
    def seen(self): return {0}, self.mine
class Net(nn.Identity):
    def forward(self, inputs): return inputs * {0}
"""


@pytest.fixture(scope="module")
def shell(clean_terminal: Terminal) -> Terminal:
    assert clean_terminal.run("%load_ext gpupool\n%gpupool start --cpu -n 2").success
    assert clean_terminal.run("import gpupool, importlib, sys, torch").success
    return clean_terminal


@pytest.fixture
def edited(shell: Terminal, tmp_path: Path) -> Iterator[Path]:
    """The file of a module that the notebook and the ranks have imported."""
    shell.run(f"sys.path.insert(0, {str(tmp_path)!r})")
    file = tmp_path / "edited35.py"
    file.write_text(MODULE.format(1))
    shell.run("sys.modules.pop('edited35', None)\nimport edited35\nfrom edited35 import value")
    shell.run("%%spmd\nmine = edited35.Scale()\nmine.mine = rank")
    shell.run("made = edited35.Scale(); made.mine = 'notebook'")
    cell = "%%spmd\nprint(value(), edited35.value(), made.seen())\nmade.mine = rank"
    assert shell.run_briefly(cell).stdout == "[0, 1] 1 1 (1, 'notebook')\n"
    yield file
    shell.run(f"sys.path.remove({str(tmp_path)!r})")


ASK = (
    "pool = gpupool.current_pool()\n"
    "seen = lambda: (edited35.value(), value(), edited35.Scale.factor)\n"
    "print(edited35.value(), pool.run(seen)[1])"
)
PREDICT = "print(gpupool.predict(edited35.Net(), torch.ones(4, 1)).unique().tolist())"
# What ranks have made keeps its state. With importlib alone the notebook's object is an old one.
SEEN = """r = gpupool.current_pool().run("mine.seen()")
s = pool.run(lambda: made.seen())
print(r[0], r[1], s[1], made.seen())"""


def test_by_importlib(shell: Terminal, edited: Path) -> None:
    edited.write_text(MODULE.format(2222))
    assert shell.run(ASK).stdout == "1 (1, 1, 1)\n"  # the notebook has the old one, too
    shell.run("importlib.reload(edited35)\nfrom edited35 import value")
    assert shell.run(ASK).stdout == "2222 (2222, 2222, 2222)\n"
    assert shell.run(PREDICT).stdout.endswith("[2222.0]\n")
    assert shell.run(SEEN).stdout == f"{2222, 0} {2222, 1} {1, 'notebook'} {1, 'notebook'}\n"
    shell.run("pool.restart([1])")
    assert shell.run(ASK).stdout == "2222 (2222, 2222, 2222)\n"


def test_by_autoreload(shell: Terminal, edited: Path) -> None:
    shell.run("%load_ext autoreload\n%autoreload 2")
    edited.write_text(MODULE.format(2222))
    assert shell.run(ASK).stdout == "2222 (2222, 2222, 2222)\n"
    assert shell.run(SEEN).stdout == f"{2222, 0} {2222, 1} {2222, 1} {2222, 'notebook'}\n"
    shell.run("%autoreload 0")


def test_what_cannot_be_loaded_again_is_told(shell: Terminal, edited: Path) -> None:
    edited.write_text(MODULE.format(2222))
    shell.run("importlib.reload(edited35)")
    edited.write_text("import edited35\n1 / 0")
    shown = shell.run_briefly("%%spmd\nprint(edited35.value())")
    assert "[0, 1] 1\n" in shown.stdout
    assert "still has the module edited35 as it was" in shown.stdout + shown.stderr
