"""Where a rank is, as plain data, and whether two are in the same collective."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from gpupool.core.wire.location import Collective, Location

SUM = Collective("all_reduce", 5, [0, 1, 2], 31.2, "float32[4]", "0")


def test_as_plain_data_there_and_back() -> None:
    where = Location("Cell In[3], line 2", SUM, "all_reduce", 1.5, False, [SUM, SUM])
    assert Location.from_dict(json.loads(json.dumps(asdict(where)))) == where
    assert Location.from_dict(asdict(Location(last=[]))) == Location(last=[])


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        (SUM, Collective("all_reduce", 5, group="0"), True),
        (SUM, Collective("all_reduce", 6, group="0"), False),
        (SUM, Collective("all_reduce", 5, group="1"), False),
        (Collective("recv"), Collective("isend"), True),
        (Collective("recv"), Collective("irecv"), False),
    ],
)
def test_two_ranks_are_in_the_same_collective(
    one: Collective, other: Collective, match: bool
) -> None:
    assert (one.matches(other), other.matches(one)) == (match, match)
