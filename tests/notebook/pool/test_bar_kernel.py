"""The bar of a pool in a real kernel: what it sends, hears and answers, and what the file keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernel import Kernel
from tests.notebook.pages import Page


def is_over(page: Page) -> bool:
    return page.view["state"] == "stopped" and ">stopped<" in page.html


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    clean_kernel.run("%load_ext gpupool")
    return clean_kernel


@pytest.fixture
def page(kernel: Kernel) -> Iterator[Page]:
    """A page that shows a new pool of two ranks, and has been answered."""
    page = Page(kernel, "presses", "gpupool-bar-")
    for _, kind, content in kernel.run("%gpupool start --cpu -n 2").messages:
        page.take(kind, content)
    assert page.view["answers"] == 0
    page.send("hello")
    page.follow(lambda page: page.view["answers"] == 1)
    yield page
    kernel.run("%gpupool env BAR_* --unset\n%gpupool stop")


def test_the_state_travels_while_the_html_stays(kernel: Kernel, page: Page) -> None:
    assert page.view["state"] == "idle"
    assert 1700 < page.view["idle_left_s"] <= 1800
    assert "shuts down after 30 min idle" in page.html
    drawn = page.html
    sleep = "%%spmd --nowait\nimport time\ntime.sleep(60)"
    page.run(sleep, lambda page: page.view["state"] == "busy")
    assert page.view["idle_left_s"] is None
    assert page.html == drawn  # or the saved notebook would say "busy" for ever

    page.send("interrupt")
    page.follow(lambda page: page.view["presses"] == 1)  # the acknowledgement
    page.follow(lambda page: page.view["state"] == "idle" and page.view["note"] == "")
    assert kernel.run("%gpupool interrupt").text.startswith("No rank is busy.")
    for press in ("interrupt", "nonsense", "hello"):
        page.send(press)
    page.follow(lambda page: page.view["answers"] == 2)
    assert (page.view["presses"], page.view["state"]) == (2, "idle")
    assert kernel.run("%spmd rank").status == "ok"


def test_a_press_that_is_heard_late_does_not_meet_the_next_cell(kernel: Kernel, page: Page) -> None:
    sleep = "%%spmd --nowait\nimport time\ntime.sleep(60)"
    page.run(sleep, lambda page: page.view["state"] == "busy")
    ended = page.view
    page.send("interrupt")
    page.follow(lambda page: page.view["state"] == "idle")
    page.run(sleep, lambda page: page.view["state"] == "busy")
    page.send("interrupt", view=ended)
    page.follow(lambda page: "had already finished" in page.view["note"])
    assert page.view["state"] == "busy"
    page.send("interrupt")
    page.follow(lambda page: page.view["state"] == "idle" and page.view["note"] == "")


def test_shut_down_ends_the_pool_and_says_so(kernel: Kernel, page: Page) -> None:
    page.send("stop")
    page.follow(is_over)
    assert page.view["presses"] == 1
    assert page.view["notice"] == "shut down with the button of its bar"
    assert "shut down with the button of its bar" in page.html
    refused = kernel.run("%gpupool log")
    assert "(the last one was shut down with the button of its bar)" in refused.error_text
