"""The strip per rank: what ranks report, in buckets of steps, as cells and as a picture."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64decode
from urllib.parse import unquote

from gpupool.core.wire.events import EndEvent, RankEvent, StartEvent, StepEvent, ValidationEvent
from gpupool.notebook.monitor.picture import history_html
from gpupool.notebook.monitor.timeline import LEVELS, timeline_svg, timeline_view
from gpupool.training.history import TrainingHistory
from gpupool.training.timeline import MAX_BUCKETS, Timeline

AXIS = {"low": 0, "high": 400, "ticks": []}


def trained(num_ranks: int, num_steps: int = 400, slow: int = 1) -> TrainingHistory:
    """A training whose rank `slow` takes twice as long in its second half."""
    ranks = tuple(range(num_ranks))
    history = TrainingHistory()
    history.add(
        StartEvent(2, num_steps // 2, 64, 8, num_ranks, "CPU", "gloo", num_steps, ranks=ranks)
    )
    for step in range(1, num_steps + 1):
        history.add(StepEvent(step, 1, 1.0, 0.5, 0.1, 8, 0.1 * step, 0.01))
        if step % 8 == 0:
            for rank in ranks:
                work = 0.1 if rank == slow and step > num_steps // 2 else 0.05
                history.add(RankEvent(rank, step, work, 0.1, 0.25))
    history.add(ValidationEvent(num_steps // 2, 1, 1.0, 0.5, 8, 20.0))
    history.add(EndEvent("epochs", num_steps, 40.0))
    return history


def test_a_report_is_of_all_steps_since_the_last() -> None:
    timeline = Timeline()
    timeline.add(RankEvent(0, 4, 0.1, 0.2, 0.5))
    timeline.add(RankEvent(0, 6, 0.3, 0.3, None))
    assert timeline.means(0, "own") == [0.1] * 4 + [0.3] * 2
    assert timeline.means(0, "wait") == [0.5] * 4 + [0.0] * 2
    assert timeline.means(0, "utilization") == [0.5] * 4 + [None] * 2
    assert timeline.means(1, "own") == [None] * 6
    timeline.add(RankEvent(0, 6, 0.3, 0.3, None))  # at the end, once more
    assert timeline.num_buckets == 6


def test_buckets_are_few_however_long_it_lasts() -> None:
    timeline = Timeline()
    for step in range(10, 100_001, 10):
        timeline.add(RankEvent(0, step, 0.1 if step <= 50_000 else 0.2, 0.2, 1.0))
    assert timeline.num_buckets <= MAX_BUCKETS
    means = timeline.means(0, "own")
    half = 50_000 // timeline.width
    assert all(abs(mean - 0.1) < 1e-9 for mean in means[:half] if mean is not None)
    assert all(abs(mean - 0.2) < 1e-9 for mean in means[half + 1 :] if mean is not None)


def test_ranks_that_begin_again_do_not_count_what_is_between() -> None:
    timeline = Timeline()
    timeline.add(RankEvent(0, 20, 0.1, 0.1))
    timeline.add(RankEvent(0, 8, 0.3, 0.3))
    assert timeline.means(0, "own")[6:9] == [0.1, 0.2, 0.1]


def test_the_slow_rank_is_darker_and_a_validation_a_gap() -> None:
    view = timeline_view(trained(16))
    own = view["strips"][0]
    half = view["count"] // 2
    assert [strip["name"] for strip in view["strips"]] == list(Timeline.NAMES)
    assert set(own["cells"][0]) == {LEVELS[0]}
    assert set(own["cells"][1][half:]) == {LEVELS[-1]}
    assert view["gaps"] == [200]
    assert view["row"] * 16 + 20 <= 130


def test_one_rank_waits_for_nobody_and_none_has_no_strip() -> None:
    assert [strip["name"] for strip in timeline_view(trained(1))["strips"]] == [
        "own",
        "utilization",
    ]
    assert timeline_view(TrainingHistory()) == {}
    assert timeline_svg({}, AXIS, 0, 100, 0) == ("", 0)


def test_the_picture_has_a_pixel_for_each_cell() -> None:
    view = timeline_view(trained(64))
    drawn, height = timeline_svg(view, AXIS, 46, 640, 500)
    (data,) = re.findall(r"data:image/png;base64,([^\"]+)", drawn)  # one strip of so many ranks
    png = b64decode(data)
    assert struct.unpack(">II", png[16:24]) == (view["count"], 64)
    place = png.index(b"IDAT")
    (length,) = struct.unpack(">I", png[place - 4 : place])
    pixels = zlib.decompress(png[place + 4 : place + 4 + length])
    rows = [pixels[n : n + view["count"] + 1] for n in range(0, len(pixels), view["count"] + 1)]
    assert rows[0][1:] == bytes([1]) * view["count"]
    assert rows[1][-1] == len(LEVELS)
    assert height < 300
    assert len(drawn) < 12_000


def test_the_picture_that_stays_has_all_strips_of_few_ranks() -> None:
    page = history_html(trained(2))
    (data,) = re.findall('<img[^>]* src="data:image/svg\\+xml,([^"]+)"', page)
    picture = unquote(data)
    assert picture.count("data:image/png;base64,") == 3
    assert "Own time per step by rank" in picture
    assert len(history_html(trained(16))) - len(page) < 12_000
