"""The magics in a real kernel: what a notebook shows, message by message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Kernel, draws
from tests.support.waits import peers, touch, until_there

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of two ranks; every test leaves it usable."""
    clean_kernel.started = clean_kernel.run(START)  # type: ignore[attr-defined]
    return clean_kernel


def no_frame_of_ours(text: str) -> bool:
    return "gpupool/" not in text and "ipyparallel" not in text


# ---- the pool --------------------------------------------------------------------------------


def test_the_start_shows_progress_and_then_the_pool_in_its_place(kernel: Kernel) -> None:
    started: Cell = kernel.started  # type: ignore[attr-defined]
    shown = [
        content["data"]["text/plain"] for _, kind, content in started.messages if "display" in kind
    ]
    *lines, _bar = shown
    assert lines[0] == "Starting the pool (starting 2 ranks) [00:00]"
    times = [re.fullmatch(r"Starting the pool \(.+\) \[00:(\d\d)\]", line) for line in lines]
    seconds = [int(found[1]) for found in times if found]
    assert len(seconds) == len(lines)
    assert seconds == sorted(seconds)
    (bar,) = started.outputs
    first, *ranks = bar["data"]["text/plain"].splitlines()
    assert first == "Pool of 2: idle, CPU ranks, gloo, shuts down in 30 min if idle"
    assert len(ranks) == 2
    assert "<b>Pool of 2</b>" in started.html
    assert '<summary style="cursor:pointer">Details</summary>' in started.html


def test_a_start_that_fails_leaves_a_sentence_where_the_clock_was(kernel: Kernel) -> None:
    source = """
from gpupool.notebook.pool.tables import StartProgress
with StartProgress() as progress:
    progress("a stage")
    raise ValueError"""
    line, error = kernel.run(source).outputs
    assert line["data"] == {"text/plain": "The pool was not started."}
    assert error["type"] == "error"


# ---- output ----------------------------------------------------------------------------------


def test_output_is_shown_while_the_cell_runs_and_grouped_at_the_end(
    kernel: Kernel, tmp_path: Path
) -> None:
    seen = {0: tmp_path / "0", 29: tmp_path / "29"}  # each step is seen before the next one
    waits = "\n".join(
        f"    if i == {i}:\n{until_there(path, margin=' ' * 8)}" for i, path in seen.items()
    )
    cell = kernel.run(
        f"%%spmd\nfor i in range(31):\n    print('step', i, flush=True)\n{waits}",
        meanwhile=[(draws(f"step {i}"), path.touch) for i, path in seen.items()],
    )
    live = cell.drawn[:-1]
    assert not any("step 30" in data["text/plain"] for data in live if data is not live[-1])
    assert all(len(data["text/plain"].splitlines()) <= 20 for data in live)

    (output,) = cell.outputs  # one display, whose content was replaced
    lines = [f"step {i}" for i in range(31)]
    assert output["data"]["text/plain"].split() == " ".join(["[0, 1]", *lines]).split()
    assert "<b>2 ranks</b>" in cell.html
    assert "✓ 2 ok" in cell.html
    assert "identical on 2 ranks" in cell.html


def test_long_output_is_cut_and_kept_in_the_result(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd -o long\nprint(*range(1000), sep='\\n')")
    assert "[... 750 of 1,000 lines left out: long.text(0) ...]" in cell.text
    assert len(cell.text.splitlines()) == 251
    assert kernel.run("print(len(long.text(1).splitlines()))").text == "1000"


def test_a_bar_that_redraws_itself_is_seen_moving_and_stays_one_line(
    kernel: Kernel, tmp_path: Path
) -> None:
    seen = {i: tmp_path / str(i) for i in (0, 5)}
    waits = "\n".join(
        f"    if i == {i}:\n{until_there(path, margin=' ' * 8)}" for i, path in seen.items()
    )
    cell = kernel.run(
        f"%%spmd\nfor i in range(10):\n    print(f'{{i}} of 9', end='\\r', flush=True)\n{waits}",
        meanwhile=[(draws(f"[0, 1] {i} of 9"), path.touch) for i, path in seen.items()],
    )
    shown = [data["text/plain"] for data in cell.drawn]
    line = r"\[0(, 1)?\] \d of 9(\n\[1\] \d of 9)?"  # two while one is further
    assert all(re.fullmatch(line, text) for text in shown[1:-1])
    assert shown[-1] == "[0, 1] 9 of 9"


def test_figures_are_shown_with_their_ranks(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nfrom IPython.display import HTML\nfrom PIL import Image\n"
        "display(HTML(f'<i>rank {rank}</i>'))\n"
        "display(HTML('<i>both</i>'))\n"
        "display(Image.new('RGB', (4, 4), (255 * rank, 0, 0)))"
    )
    (output,) = cell.outputs
    assert output["type"] == "display_data"
    assert cell.html.count("<i>both</i>") == 1
    assert "identical on 2 ranks" in cell.html
    for rank in (0, 1):
        assert f"<b>[{rank}]</b></summary><i>rank {rank}</i>" in cell.html
    assert cell.html.count("data:image/png;base64,") == 2


# ---- errors ----------------------------------------------------------------------------------


def test_an_error_is_one_output_with_the_line_of_this_cell(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"%%spmd\n{peers(tmp_path / 'waits')}")
    cell = kernel.run(
        "%%spmd\nprint('before')\nif rank == 1:\n"
        "    until_told(); raise ValueError('bad row')\ndist.barrier()"
    )
    number = next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")
    assert cell.status == "error"
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert cell.errors[0]["evalue"] == (
        "rank 1: ValueError: bad row "
        f"(1 of 2 ranks failed, 1 was waiting; Cell In[{number}], line 4)"
    )
    assert cell.error_text == f"SpmdError: {cell.errors[0]['evalue']}"  # the rest stands above
    said, *traceback = cell.text.splitlines()
    assert said == "[0, 1] before"  # what was printed is not lost
    assert f"Cell In[{number}], line 4" in traceback  # as the notebook counts: %%spmd is 1
    assert "----> 4     until_told(); raise ValueError('bad row')" in traceback
    assert traceback[-1] == f"rank 0: waiting in barrier (Cell In[{number}], line 5)"
    assert no_frame_of_ours(cell.text)
    assert "✗ 1 failed" in cell.html
    assert "1 was waiting" in cell.html
    assert kernel.run("%%spmd\ndist.barrier()\nrank").text == "[0] 0\n[1] 1"


# ---- interrupts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "{begun}; import time\ntime.sleep(60)",
        "if rank == 0:\n    {begun}; import time\n    time.sleep(60)\ndist.barrier()",
    ],
)
def test_the_stop_button_ends_a_cell_and_the_next_one_works(
    kernel: Kernel, code: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    runs = [(lambda cell: begun.exists(), kernel.press_stop)]
    cell = kernel.run(f"%%spmd\n{code.format(begun=touch(begun))}", meanwhile=runs)
    assert cell.elapsed_s < 40  # and not the minute
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert "KeyboardInterrupt" in cell.error_text
    assert no_frame_of_ours(cell.error_text)
    assert kernel.run("%%spmd\ndist.barrier()\nrank").text == "[0] 0\n[1] 1"


def test_the_stop_button_ends_an_awaited_cell_too(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o handle\nimport time\ntime.sleep(60)")
    waits = [(draws("running"), kernel.press_stop)]  # which it shows after two seconds
    cell = kernel.run("await handle", meanwhile=waits)
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert no_frame_of_ours(cell.error_text)
    assert kernel.run("%spmd rank").text == "[0] 0\n[1] 1"
