"""The live monitor in a real kernel, without a browser: what is sent, and what the file keeps."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote

import pytest

from tests.notebook.kernel import Cell, Kernel
from tests.notebook.pages import Page

FEED = """
from gpupool.notebook.monitor.views import show_training
from tests.notebook.feed import Run
run = Run(0.004, num_epochs=3, steps_per_epoch=100)
show_training(run)
run.wait()
"""
# Guards the private name of ipykernel 7.4 that live HTML removes after each message.
ANSWERS = """
from gpupool.notebook.page.live_html import LiveHtml
live = LiveHtml(print)
after_open = "_reply_subshell_id" in vars(live.comm)
live.tell(parts={"a": "b"})
print(after_open, "_reply_subshell_id" in vars(live.comm))
"""


@pytest.fixture(scope="module")
def cell(clean_kernel: Kernel) -> Cell:
    return clean_kernel.run(FEED)


def assert_draws_two_plots(page: str) -> None:
    (data,) = re.findall('<img[^>]* src="data:image/svg\\+xml,([^"]+)"', page)
    drawn = unquote(data)
    assert drawn.startswith("<svg ")
    assert drawn.count("<polyline") == 6
    assert "best " in drawn


def test_the_output_is_html_from_the_first_moment_and_a_picture_at_the_end(
    clean_kernel: Kernel, cell: Cell
) -> None:
    first, *_, last = cell.drawn
    for data in cell.drawn:
        assert sorted(data) == ["text/html", "text/plain"]
    assert first["text/plain"].startswith("Starting")
    assert "<button" not in first["text/html"]
    (output,) = cell.outputs
    assert output["data"] == last
    assert_draws_two_plots(last["text/html"])
    assert last["text/plain"].startswith("Finished: 3 epochs in ")
    page = Page(clean_kernel)
    for _, kind, content in cell.messages:
        page.take(kind, content)
    assert page.state["still"] == last
    assert page.uid not in last["text/html"]


def test_news_come_twice_a_second(cell: Cell) -> None:
    sent = [
        content["data"]["content"]
        for _, kind, content in cell.messages
        if kind == "comm_msg" and content["data"]["method"] == "custom"
    ]
    assert 3 <= len(sent) <= 2 * cell.elapsed_s + 5  # and one for each new status
    assert len(cell.drawn) <= 3
    plots = [json.loads(news["plots"])["lines"]["loss"] for news in sent if "plots" in news]
    assert plots[0]["raw"] == []
    assert 100 < len(plots[-1]["raw"]) <= 300
    assert max(len(json.dumps(news)) for news in sent if "still" not in news) < 60_000


def test_the_kernel_may_answer_on_any_shell(clean_kernel: Kernel) -> None:
    assert clean_kernel.run(ANSWERS).text == "False False"
