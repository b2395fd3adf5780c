"""What a user reads when a cell fails on the ranks: whose line, which cell, and nothing of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpupool.core.errors import SpmdError, StillRunningError
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.pool import Pool
from gpupool.spmd.cell import SpmdRun
from tests.notebook.kernel import plain
from tests.support.raising import frames_of_ours, raises
from tests.support.waits import until_there

Fails = Callable[..., SpmdError]


@pytest.fixture
def run(pool2: Pool) -> Callable[..., SpmdRun]:

    def begin(source: str, number: int, **options: Any) -> SpmdRun:
        return SpmdRun(pool2, source, (0, 1), QuietView(), cell_number=number, **options)

    return begin


@pytest.fixture
def fails(run: Callable[..., SpmdRun]) -> Fails:

    def fails(source: str, number: int = 12, **options: Any) -> SpmdError:
        with pytest.raises(SpmdError) as caught:
            run(source, number, **options).result()
        return caught.value

    return fails


def shown(error: SpmdError) -> str:
    return plain("\n".join(error._render_traceback_()))


def first_traceback(error: SpmdError) -> str:
    return plain(error.first.traceback)


def places(error: SpmdError) -> list[tuple[str, int]]:
    found = re.findall(r"(Cell In\[\d+\]|File \S+?)(?:, line |:)(\d+)", first_traceback(error))
    return [(place, int(line)) for place, line in found]


# ---- where -----------------------------------------------------------------------------------

CELL = "Cell In[12]"


@pytest.mark.parametrize(
    ("source", "where", "marked"),
    [
        ("x = 1\n1 / 0", [(CELL, 2)], "----> 2 1 / 0"),
        ("\n\nx = 1\n1 / 0", [(CELL, 4)], "----> 4 1 / 0"),  # empty lines count
        ("\n%%time\n\nx = 1\n1 / 0", [(CELL, 5)], "----> 5 1 / 0"),
        ("\n%%capture\n%%time\n\nx = 1\n1 / 0", [(CELL, 6)], "----> 6 1 / 0"),
        ("x = 1\n%time 1 / 0", [(CELL, 2)], "----> 2 "),
        (
            "import asyncio\nasync def h():\n    await asyncio.sleep(0)\n    1 / 0\nawait h()",
            [(CELL, 5), (CELL, 4)],
            "----> 4     1 / 0",
        ),
    ],
)
def test_the_line_is_the_one_of_the_cell(
    fails: Fails, source: str, where: list[tuple[str, int]], marked: str
) -> None:
    error = fails(source)
    assert [place for place in places(error) if "<listcomp>" not in place][: len(where)] == where
    assert marked in first_traceback(error)
    innermost = f"{CELL}, line {where[-1][1]}"
    assert error.first.where == innermost
    assert str(error).endswith(f"division by zero (the same on 2 of 2 ranks; {innermost})")


def test_a_function_of_an_earlier_cell_is_shown_in_that_cell(
    run: Callable[..., SpmdRun], fails: Fails
) -> None:
    run("# one\ndef earlier(x):\n    # two\n    return 1 / x", 7).result()
    error = fails("y = 0\nearlier(y)", 9)
    assert places(error) == [("Cell In[9]", 2), ("Cell In[7]", 4)]
    assert error.first.where == "Cell In[7], line 4"


def test_a_cell_that_cannot_be_parsed_shows_its_own_line(fails: Fails) -> None:
    error = fails("\na = 1\nfor x in y print(x)")
    assert "Cell In[12], line 3\n    for x in y print(x)" in first_traceback(error)
    assert error.first.where == "Cell In[12], line 3"


# ---- what ------------------------------------------------------------------------------------


def test_chained_exceptions_are_each_shown_with_their_own_line(fails: Fails) -> None:
    error = fails(
        "def load():\n    return {}['k']\ntry:\n    load()\n"
        "except KeyError as error:\n    raise ValueError('outer') from error"
    )
    assert places(error) == [(CELL, 4), (CELL, 2), (CELL, 6)]
    text = first_traceback(error)
    assert (
        text.index("KeyError: 'k'") < text.index("direct cause") < text.index("ValueError: outer")
    )
    during = fails("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise TypeError('second')")
    assert places(during) == [(CELL, 2), (CELL, 4)]
    assert "During handling of the above exception" in first_traceback(during)


def test_a_group_shows_what_is_in_it(fails: Fails) -> None:
    error = fails(
        "import asyncio\nasync def bad(n):\n    raise ValueError(n)\n"
        "async with asyncio.TaskGroup() as g:\n"
        "    g.create_task(bad(1))\n    g.create_task(bad(2))"
    )
    assert first_traceback(error).count("Cell In[12], line 3") == 2
    assert not frames_of_ours(shown(error))


def test_long_texts_are_cut_and_the_counts_stay_in_sight(fails: Fails) -> None:
    deep = fails("def even(n):\n    odd(n)\ndef odd(n):\n    even(n)\neven(0)")
    assert str(deep).startswith("RecursionError")
    assert len(first_traceback(deep)) < 10_000
    error = fails("raise ValueError('x' * 1_000_000)")
    assert len(shown(error)) < 100_000
    assert str(error).splitlines()[0].endswith("(the same on 2 of 2 ranks; Cell In[12], line 1)")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Bad()",
            "Bad: <no message: its __str__ raised RuntimeError>",
        ),
        ("error = ValueError('v')\nerror.add_note('a note')\nraise error", "ValueError: v; a note"),
        (r"raise ValueError('half \ud800 character')", r"ValueError: half \ud800 character"),
    ],
)
def test_strange_exceptions_arrive_and_the_engine_goes_on(
    fails: Fails, pool2: Pool, source: str, told: str
) -> None:
    error = fails(source)
    assert str(error).startswith(f"{told} (the same on 2 of 2 ranks; Cell In[12], line ")
    assert not frames_of_ours(shown(error))
    error.first.traceback.encode()  # as a page has it
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}


def test_a_cell_that_waits_can_be_interrupted_and_the_one_before_it_goes_on(
    run: Callable[..., SpmdRun], tmp_path: Path
) -> None:
    first = run(f"{until_there(go := tmp_path / 'go')}\nrank", 5)
    second = run("never = 1", 6)
    with raises(StillRunningError, "cell In[6] ", " 0.1 s"):
        second.result(timeout=0.1)
    second.interrupt()
    with raises(SpmdError, " cell In[5] ", ename="KeyboardInterrupt"):
        second.result(timeout=60)
    go.touch()
    assert dict(first.result()) == {0: 0, 1: 1}
