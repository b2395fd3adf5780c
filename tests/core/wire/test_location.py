"""Where a rank is, in words and as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from gpupool.core.wire.location import Collective, Location

LINE = "Cell In[3], line 2"
SUM = Collective("all_reduce", 5, (0, 1, 2), 31.2, "float32[4]", "0")


@pytest.mark.parametrize(
    ("where", "words", "was"),
    [
        (
            Location(LINE, SUM, "all_reduce"),
            "all_reduce at Cell In[3], line 2, for 31 s",
            "in all_reduce (Cell In[3], line 2)",
        ),
        (
            Location(LINE, SUM, "reduce_scatter"),
            "reduce_scatter (all_reduce) at Cell In[3], line 2, for 31 s",
            "in reduce_scatter (all_reduce) (Cell In[3], line 2)",
        ),
        (
            Location(LINE, Collective("recv", ranks=(0, 1)), "recv"),
            "recv at Cell In[3], line 2",
            "in recv (Cell In[3], line 2)",
        ),
        (
            Location(LINE, None, "new_group"),
            "new_group at Cell In[3], line 2",
            "in new_group (Cell In[3], line 2)",
        ),
        (
            Location(LINE, SUM, queued=True),
            "all_reduce, queued at or before Cell In[3], line 2, for 31 s",
            "in all_reduce (queued at or before Cell In[3], line 2)",
        ),
        (Location(LINE), LINE, "at Cell In[3], line 2"),
        (Location("", SUM), "all_reduce, for 31 s", "in all_reduce"),
        (Location(), "code without a line of yours", ""),
        (Location(idle=True), "idle", ""),
    ],
)
def test_in_words(where: Location, words: str, was: str) -> None:
    assert (str(where), where.was) == (words, was)


def test_as_plain_data_there_and_back() -> None:
    where = Location(LINE, SUM, "all_reduce", 1.5, False, True, (SUM,), (SUM, SUM))
    assert Location.from_dict(json.loads(json.dumps(asdict(where)))) == where
    assert Location.from_dict(asdict(Location())) == Location()


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        (SUM, Collective("all_reduce", 5, group="0"), True),
        (SUM, Collective("all_reduce", 6, group="0"), False),
        (SUM, Collective("broadcast", 5, group="0"), False),
        (SUM, Collective("all_reduce", 5, group="1"), False),
        (Collective("recv"), Collective("isend"), True),
        (Collective("recv"), Collective("irecv"), False),
        (Collective("recv"), SUM, False),
        (Collective("monitored_barrier"), Collective("monitored_barrier"), True),
    ],
)
def test_two_ranks_are_in_the_same_collective(
    one: Collective, other: Collective, match: bool
) -> None:
    assert (one.matches(other), other.matches(one)) == (match, match)
