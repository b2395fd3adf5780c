"""`gpupool.monitor` where there is no notebook: lines on stderr, of ranks and of this process."""

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


@pytest.mark.parametrize(("start", "mean"), [("-n 2 --cpu", "1.5"), ("--inline", "1")])
def test_a_loop_in_a_terminal_writes_lines(clean_terminal: Terminal, start: str, mean: str) -> None:
    assert clean_terminal.run(f"%load_ext gpupool\n%gpupool start {start}").success
    shown = clean_terminal.run(LOOP)
    assert clean_terminal.run("%gpupool stop").success
    assert shown.success
    first, *_, last = [line for line in shown.stderr.splitlines() if line.startswith("Mine")]
    assert first.startswith(f"Mine: step 1 of 3, loss {mean}, ")
    assert last.startswith(f"Mine: finished, step 3 of 3, loss {mean}, ")
