"""The line that says how far something is. The clock is the only thing that is not real."""

from __future__ import annotations

import io

import pytest
from ipykernel.iostream import OutStream

from gpupool.data.progress import ProgressLine


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, step_s: float, total: int) -> str:
    """What is written when one of `total` is done every `step_s` seconds."""
    clock = Clock()
    line = ProgressLine("did {done} of {total}", stream, clock)
    for done in range(1, total + 1):
        clock.now += step_s
        line(done, total)
    return stream.getvalue()


def test_what_is_soon_over_is_not_told() -> None:
    assert written(Terminal(), 0.1, 9) == ""
    assert written(io.StringIO(), 1.0, 9) == ""


def test_on_a_terminal_the_line_is_drawn_over_itself() -> None:
    assert written(Terminal(), 0.5, 3) == "\rdid 2 of 3\rdid 3 of 3\n"
    many = written(Terminal(), 0.001, 1500)
    assert many.startswith("\rdid 1,0")
    assert many.endswith("\rdid 1,500 of 1,500\n")
    assert many.count("\r") == 4


def test_a_log_gets_a_line_now_and_then() -> None:
    assert written(io.StringIO(), 1.0, 25) == "did 10 of 25\ndid 20 of 25\ndid 25 of 25\n"


def test_without_a_known_end_it_counts() -> None:
    clock, stream = Clock(), Terminal()
    line = ProgressLine("listed {done}", stream, clock)
    clock.now = 2.0
    line(1000)
    line(1200, 1200)
    assert stream.getvalue() == "\rlisted 1,000\rlisted 1,200\n"


def test_the_stream_of_a_notebook_is_known_by_the_module_of_its_class() -> None:
    assert OutStream.__module__ == "ipykernel.iostream"


@pytest.mark.parametrize("total", [0, 1])
def test_nothing_to_do_is_no_fault(total: int) -> None:
    ProgressLine("{done} of {total}", io.StringIO())(0, total)
