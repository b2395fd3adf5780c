"""The magics in IPython on a terminal: plain text, no kernel, no browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.terminal import Terminal

# a driver may be there or not; the variable is set to "" either way
WHY_CPU = "no NVIDIA driver|CUDA_VISIBLE_DEVICES='' names no GPU of this machine"


@pytest.fixture(scope="module")
def fresh(clean_terminal: Terminal) -> Terminal:
    """A shell with the magics, without a pool at first; pools of others leave nothing for it."""
    shown = clean_terminal.run("%load_ext gpupool")
    assert (shown.stdout, shown.stderr, shown.success) == ("", "", True)
    return clean_terminal


@pytest.fixture
def terminal(fresh: Terminal) -> Terminal:
    if "No pool" in fresh.run("%gpupool").stdout:
        assert fresh.run("%gpupool start --cpu -n 2").success
    return fresh


def test_without_a_pool_the_status_says_how_to_start_one(fresh: Terminal) -> None:
    fresh.run("%gpupool stop")
    status = "No pool runs in this notebook. `%gpupool start` starts one.\n"
    assert fresh.run("%gpupool").stdout == fresh.run("%gpupool status").stdout == status
    assert fresh.run("%gpupool stop").stdout == "No pool was running.\n"
    refused = fresh.run("%gpupool env HOME")
    assert refused.stdout.startswith("NoPoolError: no pool runs in this notebook. `%gpupool start`")


def test_a_cell_starts_a_pool_and_says_so_in_one_line(fresh: Terminal) -> None:
    fresh.run("%gpupool stop")
    fresh.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''")
    shown = fresh.run("%%spmd\nprint('hello')")
    started, *rest = shown.stdout.splitlines()
    assert re.fullmatch(
        rf"gpupool: no pool was running; started 2 ranks on CPU: ({WHY_CPU}) \(gloo\)\.", started
    )
    assert rest[:2] in (["[0, 1] hello"], ["[0] hello", "[1] hello"], ["[1] hello", "[0] hello"])


def test_each_line_bears_its_ranks_and_equal_ones_are_one(terminal: Terminal) -> None:
    shown = terminal.run_briefly(
        "%%spmd\nprint('head')\nprint('rows', 8 - rank)\nprint('no end', end='')\n"
        "(rank,\n 'x' * 99)"
    )
    assert shown.stdout.splitlines() == [
        "[0, 1] head",
        "[0] rows 8",
        "[1] rows 7",
        "[0, 1] no end",
        "[0] (0,",  # a value of several lines bears it on each
        "[1] (1,",
        f"[0, 1]  '{'x' * 99}')",
    ]


def test_nothing_may_stand_above_the_magic(terminal: Terminal) -> None:
    for code in ("import os", "if True:\n    pass", "%spmd rank", "# a remark"):
        refused = terminal.run(f"{code}\n%%spmd\nprint('ran')")
        assert "OptionsError: %%spmd must be the first line of its cell" in refused.stdout
        assert "ran" not in refused.stdout.replace("rank", "")
        assert "Traceback" not in refused.stdout
    assert terminal.run('print("""# no magic\n%%spmd\n""")').stdout == "# no magic\n%%spmd\n\n"


def test_an_expression_shows_equal_values_once(terminal: Terminal) -> None:
    assert terminal.run("%spmd {'ranks': world_size}").stdout.endswith("[0, 1] {'ranks': 2}\n")
    assert "as in `%spmd rank * 2`" in terminal.run("%spmd").stdout
    shown = terminal.run("%%spmd -o mine --view quiet\nprint('said', rank)\nrank ** 2")
    assert shown.stdout == ""
    assert terminal.run("print(mine[1], repr(mine.text(1)))").stdout == "1 'said 1\\n'\n"
    assert terminal.run("%gpupool interrupt").stdout == "No rank is busy.\n"


def test_env_shows_names_and_never_values(terminal: Terminal) -> None:
    assert terminal.run("%gpupool env").stdout == "No variable has been propagated.\n"
    terminal.run("import os; os.environ.update(MY_TOKEN='s3cr3t-value', MY_MODE='fast')")
    sent = terminal.run("%gpupool env MY_*").stdout
    assert re.fullmatch(r"On 2 ranks: MY_MODE \(\w{6}\), MY_TOKEN \(\w{6}\)\n", sent)
    assert terminal.run("%gpupool env").stdout == sent
    assert "env: MY_MODE, MY_TOKEN (hidden)" in terminal.run("%gpupool").stdout
    masked = terminal.run_briefly(
        "%%spmd -t 0\nimport os\nprint(os.environ['MY_TOKEN'], os.environ['MY_MODE'])"
    )
    assert masked.stdout == "[0] [hidden] fast\n"
    removed = terminal.run("%gpupool env MY_* --unset").stdout
    assert removed == "Removed from 2 ranks: MY_MODE, MY_TOKEN\n"
    assert terminal.run("%gpupool env MY_* --unset").stdout == "No variable matches.\n"
    assert "name the variables to remove" in terminal.run("%gpupool env --unset").stdout


def test_hosts_and_machines_of_a_pool_on_this_one(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("%gpupool hosts").stdout == "All ranks of the pool are on this machine.\n"
    assert terminal.run("%gpupool stop --down").stdout.startswith(
        "OptionsError: --down: no machines"
    )
    assert terminal.run("%spmd rank").success  # nothing was stopped
    down = "import gpupool; launch = gpupool.current_pool().engines.launch; launch.down = "
    terminal.run(f"{down}'touch {tmp_path / 'down'}'")
    assert terminal.run("%gpupool stop --down").stdout == "Pool stopped.\n"
    assert (tmp_path / "down").exists()
    terminal.run("launch.down = 'cat /nowhere'")  # machines outlast the pool
    refused = terminal.run("%gpupool stop --down").stdout
    assert refused.startswith("PoolError: the pool was stopped; its machines may run on")
    assert "/nowhere: No such file" in refused
