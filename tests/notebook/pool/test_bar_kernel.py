"""The bar of a pool in a real kernel: what it sends, hears and answers, and what the file keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpupool import Pool
from gpupool.core.machine.topology import Gpu
from gpupool.notebook.pool_bar import rank_rows, status_text
from tests.notebook.kernel import Kernel
from tests.notebook.pages import Page

SLEEP = "%%spmd --nowait\nimport time\ntime.sleep(60)"


def is_idle(page: Page) -> bool:
    return ">idle<" in page.parts["head"] and "Interrupted" not in page.parts["buttons"]


def is_busy(page: Page) -> bool:
    return ">busy<" in page.parts["head"]


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    clean_kernel.run("%load_ext gpupool")
    return clean_kernel


@pytest.fixture
def page(kernel: Kernel) -> Iterator[Page]:
    page = Page(kernel)
    for _, kind, content in kernel.run("%gpupool start --cpu -n 2").messages:
        page.take(kind, content)
    assert page.state["answers"] == 0
    page.send("hello")
    page.follow(lambda page: page.state["answers"] == 1)
    yield page
    kernel.run("%gpupool stop")


def test_the_state_travels_while_the_html_stays(kernel: Kernel, page: Page) -> None:
    assert is_idle(page)
    assert "shuts down after 30 min idle" in page.html
    assert "<button" not in page.html
    drawn = page.html
    page.run(SLEEP, is_busy)
    assert page.html == drawn  # or the saved notebook would say "busy" for ever

    page.send("interrupt")
    page.follow(lambda page: page.state["presses"] == 1)  # the acknowledgement
    page.follow(is_idle)
    assert kernel.run("%gpupool interrupt").text.startswith("No rank is busy.")
    for press in ("interrupt", "nonsense", "hello"):
        page.send(press)
    page.follow(lambda page: page.state["answers"] == 2)
    assert is_idle(page)
    assert kernel.run("%spmd rank").status == "ok"


def test_a_press_that_is_heard_late_does_not_meet_the_next_cell(kernel: Kernel, page: Page) -> None:
    page.run(SLEEP, is_busy)
    ended = page.state["meant"]
    page.send("interrupt")
    page.follow(is_idle)
    page.run(SLEEP, is_busy)
    page.send("interrupt", meant=ended)
    page.follow(lambda page: "had already finished" in page.parts["buttons"])
    assert is_busy(page)
    page.send("interrupt")
    page.follow(is_idle)


def test_shut_down_ends_the_pool_and_says_so(kernel: Kernel, page: Page) -> None:
    page.send("stop")
    page.follow(lambda page: ">stopped<" in page.html and "still" in page.state)
    assert "shut down with the button of its bar" in page.html
    assert page.state["still"]["text/html"] == page.html  # for a page that was loaded again
    assert "gpl-" + page.uid not in page.html
    refused = kernel.run("%gpupool env")
    assert "(the last one was shut down with the button of its bar)" in refused.error_text


def test_each_rank_has_its_host_beside_it(pool2: Pool) -> None:
    status = pool2.status()
    ranks = [
        replace(one, host=f"gpu{one.rank + 1}", gpu=Gpu(one.rank, "GPU-0", "NVIDIA H200"))
        for one in status.ranks
    ]
    shown = replace(status, ranks=tuple(ranks))
    first, *lines = status_text(shown).splitlines()
    assert first.startswith("Pool of 2 on 2 hosts: idle, ")
    assert lines[1].startswith("  rank 1 (gpu2)  1: NVIDIA H200  ")
    assert rank_rows(shown)[1][0] == "1 (gpu2)"
