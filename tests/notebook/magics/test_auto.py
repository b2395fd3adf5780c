"""`%gpupool auto`: which cells go to the ranks, and how the input is changed for it."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics import auto, magics
from gpupool.notebook.magics.arguments import auto_options
from gpupool.notebook.magics.completion import complete
from gpupool.pool.pool import Pool
from tests.support.raising import raises


@pytest.fixture
def shell() -> InteractiveShell:
    shell = InteractiveShell()
    magics.register(shell)
    return shell


@pytest.mark.parametrize(
    ("cell", "here"),
    [
        ("x = 1", False),
        ("", True),
        ("%gpupool", True),
        ("# a comment\n%gpupool stop", True),
        ("import os\n%gpupool env AWS_*", True),
        ("x = %spmd rank", True),
        ("a, b = %spmd (rank, 1)", True),
        ("%%spmd\nx = 1", True),
        ("%%spmd -t 0\nx = 1", True),
        ("text = '''\nsee %gpupool there\n'''", False),  # not at the beginning of a line
        ("%load_ext gpupool", True),
        ("%load_ext autoreload\n%autoreload 2", False),  # modules are imported on the ranks
        ("%autoreload 2", False),
        ("%history", True),
        ("%debug", True),
        ("%config InlineBackend.figure_format = 'svg'", True),
        ("%loadings", False),
        ("%%time\nx = 1", False),
        ("%%bash\nls", False),
        ("%%mine\nselect", True),  # an extension's: the ranks have none
        ("%%unknown\nx", False),
        ("%matplotlib inline", False),
        ("!ls", False),
        ("x?", False),
        ("%time x = 1", False),
        ("await something()", False),
    ],
)
def test_cells_about_the_notebook_stay_there(
    shell: InteractiveShell, cell: str, here: bool
) -> None:
    def mine(line: str, cell: str) -> None:
        """A magic of an extension."""

    shell.register_magic_function(mine, "cell")
    assert auto.stays_here(cell, shell) is here


def on(shell: InteractiveShell, pool: Pool, line: str = "on") -> auto.Auto:
    auto.command(shell, line, pool)
    return auto.of(shell)


def test_the_input_is_changed_for_whole_cells_alone(shell: InteractiveShell, pool2: Pool) -> None:
    assert shell.transform_cell("x = 1") == "x = 1\n"
    on(shell, pool2, "on -t 0 --view raw --timeout 2.50")
    assert shell.transform_cell("x = 1") == (
        "get_ipython().run_cell_magic('spmd', '--auto -t 0 --view raw --timeout 2.5', 'x = 1\\n')\n"
    )
    # what runs inside of a cell is none
    shell.user_ns["shell"] = shell
    shell.run_cell("%%local\ninside = shell.transform_cell('x = 1')")
    assert shell.user_ns["inside"] == "x = 1\n"
    # typing goes on as ever: a cell magic would end with an empty line alone
    assert shell.check_complete("x = 1")[0] == "complete"
    assert shell.check_complete("def f():")[0] == "incomplete"
    auto.command(shell, "off", None)
    assert shell.transform_cell("x = 1") == "x = 1\n"


def test_local_runs_a_cell_in_the_notebook_and_keeps_its_lines(
    shell: InteractiveShell, pool2: Pool
) -> None:
    for mode in ("off", "on"):
        auto.command(shell, mode, pool2)
        assert shell.transform_cell("%%local\n\nx = 1") == "# %%local\n\nx = 1\n"
        assert "run_cell_magic('time'" in shell.transform_cell("%%local\n%%time\nx = 1")


def test_the_state_is_told_in_a_sentence(shell: InteractiveShell, pool2: Pool) -> None:
    assert auto.command(shell, "", None).startswith("auto is off: cells run in the notebook")
    assert auto.command(shell, "on -t 1", pool2).startswith(
        "auto is on: every cell runs on rank 1 with -t 1. %%local"
    )
    assert auto.command(shell, "", None).startswith("auto is on")


@pytest.mark.parametrize(
    ("line", "kind", "names", "shown"),
    [
        ("onn", "form", ["state"], "'on'"),
        ("off -t 0", "no effect", ["-t"], "`%gpupool auto on`"),
        ("--view raw", "no effect", ["--view"], "`%gpupool auto on`"),
        ("on --nowait", "no option", ["--nowait"], "--timeout"),
        ("on --timeout 0", "form", ["--timeout"], " 0 "),
        ("on off", "too much", [], "'off'"),
        ("'on", "form", [], ""),
    ],
)
def test_wrong_words_are_refused(line: str, kind: str, names: list[str], shown: str) -> None:
    with raises(OptionsError, kind, *names, shown=shown):
        auto_options(line)


def test_wrong_ranks_are_refused_and_change_nothing(shell: InteractiveShell, pool2: Pool) -> None:
    with raises(OptionsError, "ranks", "ranks", shown=" 0 to 1."):
        auto.command(shell, "on -t 5", pool2)
    assert not auto.of(shell).is_on


def test_the_words_are_completed() -> None:
    assert complete("%gpupool au", {}) == ["auto"]
    assert complete("%gpupool auto o", {}) == ["on", "off"]
    assert complete("%gpupool auto on --v", {}) == ["--view"]
    assert complete("%gpupool auto on --view r", {}) == ["ranks", "raw"]
    assert "--auto" not in complete("%%spmd --", {})


def test_a_stopped_pool_puts_it_off_and_the_cell_does_not_run(shell: InteractiveShell) -> None:
    from gpupool.core.errors import PoolError
    from gpupool.pool import session

    session.stop()
    pool = session.start(n=1, device="cpu")
    mode = on(shell, pool)
    mode.require_pool()
    pool.stop("stopped after 30 min without use")
    shown = ("stopped after 30 min without use", "\n", "`%gpupool auto on`")
    with raises(PoolError, "stopped", shown=shown):
        mode.require_pool()
    assert not mode.is_on
    mode.require_pool()


def test_unloading_puts_it_off(shell: InteractiveShell, pool2: Pool) -> None:
    on(shell, pool2)
    magics.unregister(shell)
    assert not auto.of(shell).is_on
    assert shell.transform_cell("x = 1") == "x = 1\n"
    assert "local" not in shell.magics_manager.magics["cell"]
