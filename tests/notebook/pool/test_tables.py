"""What `%gpupool env` and `%gpupool leftovers` say, in text and HTML."""

from __future__ import annotations

import os
from pathlib import Path

from gpupool.core.machine.processes import ProcessId
from gpupool.notebook.pool.tables import env_text, leftovers_html, leftovers_text
from gpupool.pool.processes.leftovers import Leftover, Leftovers

ONE = Leftover(ProcessId.of(os.getpid()), "gpupool:<rank 0>", Path("x"))


def test_few_variables_are_on_one_line_and_many_on_one_each() -> None:
    assert env_text({"A": "ab12cd", "B": "ef34"}, 2) == "On 2 ranks: A (ab12cd), B (ef34)"
    many = env_text({f"AWS_{n}": "ab12cd" for n in range(6)}, 8, credentials="good until 14:03")
    first, *rest, last = many.splitlines()
    assert first == "On 8 ranks:"
    assert rest == [f"  AWS_{n} (ab12cd)" for n in range(6)]
    assert last == "good until 14:03"


def test_leftovers_are_told_with_the_way_to_end_them() -> None:
    text = leftovers_text(Leftovers([ONE]))
    assert text.splitlines()[0] == "1 process of earlier pools still runs:"
    assert text.endswith("\n`%gpupool leftovers --reap` ends them.")
    html = leftovers_html(Leftovers([ONE, ONE]))
    assert "<b>2 processes of earlier pools still run</b>" in html
    assert html.count("<td") == 6
    assert "gpupool:&lt;rank 0&gt;" in html


def test_no_leftovers_need_no_way_to_end_them() -> None:
    sentence = "Nothing is left of earlier pools."
    assert leftovers_text(Leftovers()) == sentence
    assert sentence in leftovers_html(Leftovers())
