"""`gpupool.monitor` where there is no notebook: lines on stderr."""

from __future__ import annotations

import pytest

from tests.notebook.terminal import Terminal

pytestmark = pytest.mark.long

LOOP = """%%spmd
import gpupool
with gpupool.monitor(["loss"], num_steps=3, title="Mine") as monitor:
    for step in (1, 2, 3):
        monitor.record(step, loss=torch.tensor(1.0 + rank))
"""


def test_a_loop_in_a_terminal_writes_lines(clean_terminal: Terminal) -> None:
    assert clean_terminal.run("%load_ext gpupool\n%gpupool start -n 2 --cpu").success
    shown = clean_terminal.run(LOOP)
    assert clean_terminal.run("%gpupool stop").success
    assert shown.success
    first, *_, last = [line for line in shown.stderr.splitlines() if line.startswith("Mine")]
    assert first.startswith("Mine: step 1 of 3, loss 1.5, ")
    assert last.startswith("Mine: finished, step 3 of 3, loss 1.5, ")
