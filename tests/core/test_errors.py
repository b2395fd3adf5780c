"""What a user reads when ranks fail."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpupool.core import errors
from gpupool.core.errors import (
    DataError,
    EngineDiedError,
    GpuPoolError,
    OptionsError,
    PoolError,
    RankError,
    SampleError,
    SpmdError,
    TransferError,
    UnansweredError,
)

IN_SUM = "in all_reduce (Cell In[3], line 2)"


def failed(rank: int, evalue: str = "bad", at: float = 0.0, freed: bool = False) -> RankError:
    return RankError(rank, "ValueError", evalue, f"Traceback of {rank}", at, freed)


def spmd(*ranks: RankError, world_size: int = 4) -> SpmdError:
    return SpmdError({error.rank: error for error in ranks}, world_size)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (spmd(failed(1)), "rank 1: ValueError: bad (1 of 4 ranks failed)"),
        (spmd(failed(0), failed(1), world_size=2), "ValueError: bad (the same on 2 of 2 ranks)"),
        (
            spmd(failed(0), failed(2, "other"), failed(3)),
            "rank 0: ValueError: bad (3 of 4 ranks failed)",
        ),
        (
            spmd(failed(2, "first line\nsecond line")),
            "rank 2: ValueError: first line (1 of 4 ranks failed)\nsecond line",
        ),
        (spmd(RankError(0, "AssertionError", "")), "rank 0: AssertionError (1 of 4 ranks failed)"),
        (
            spmd(failed(3, at=1.0), replace(failed(0, freed=True), was=IN_SUM),
                 replace(failed(1, freed=True), was="at Cell In[3], line 7")),
            "rank 3: ValueError: bad (1 of 4 ranks failed, 1 was waiting, 1 stopped)",
        ),
    ],
)  # fmt: skip
def test_the_message_names_the_rank_the_error_and_how_many(error: SpmdError, message: str) -> None:
    assert str(error) == message


def test_the_rank_that_failed_first_is_shown_and_never_one_that_was_only_freed() -> None:
    assert spmd(failed(0, at=3.0), failed(1, at=1.0), failed(2, at=2.0)).first.rank == 1
    assert spmd(failed(0, at=1.0, freed=True), failed(1, at=9.0)).first.rank == 1
    error = spmd(failed(3, at=1.0), failed(2, at=1.0))
    assert (error.first.rank, list(error.errors)) == (2, [2, 3])


def test_ipython_shows_the_first_traceback_and_one_line_for_each_other_kind() -> None:
    other = replace(failed(0, at=2.0, freed=True), was=IN_SUM)
    dead = RankError(4, "EngineDiedError", "rank 4 was killed", was=IN_SUM)
    error = spmd(failed(1), failed(2, "x", 1.0), failed(3, "x", 1.0), other, world_size=5)
    assert error._render_traceback_() == [
        f"SpmdError: {error}",
        "",
        "rank 1:",
        "Traceback of 1",
        "",
        "rank 0: waiting in all_reduce (Cell In[3], line 2)",
        "rank 2, 3: ValueError: x",
    ]
    assert error.others() == {"ValueError: x": [2, 3], f"waiting {IN_SUM}": [0]}
    assert spmd(failed(0), dead).details()[-1] == (
        f"rank 4: EngineDiedError: rank 4 was killed (was {IN_SUM})"
    )
    hinted = spmd(replace(failed(1), hint="GPU memory: none left."))
    assert hinted.details() == ["", "rank 1:", "Traceback of 1", "", "GPU memory: none left."]
    assert PoolError("no pool.")._render_traceback_() == ["PoolError: no pool."]


def test_the_host_of_a_rank_is_named_where_it_has_one() -> None:
    hosts = {1: "gpu1", 2: "gpu2", 3: "gpu2"}
    error = spmd(*(replace(failed(n, at=n, freed=n > 1), host=hosts[n]) for n in hosts))
    assert str(error).startswith("rank 1 (gpu1): ValueError: bad (")
    assert error.details()[1] == "rank 1 (gpu1):"
    assert error.details()[-1] == "rank 2, 3 (gpu2): waiting in a collective"


def test_attributes_say_what_happened_whatever_the_wording_and_survive_pickling() -> None:
    url = "s3://b/1"
    for error, facts in (
        (OptionsError("lr=0: ..."), {}),
        (UnansweredError("no.", ranks=[2, 1]), {"ranks": (2, 1)}),
        (EngineDiedError("dead", 3.5), {"ranks": (), "died_at": 3.5}),
        (DataError("busy", "busy", url=url), {"kind": "busy", "url": url}),
        (SampleError("large", url, "too large"), {"reason": "too large", "url": url}),
        (TransferError({"x": "a lock"}), {"reasons": {"x": "a lock"}}),
        (spmd(failed(1), failed(3, at=1.0)), {"ranks": (1, 3), "by_user": False}),
        (spmd(replace(failed(1), by_user=True)), {"by_user": True}),
    ):
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert {name: getattr(one, name) for name in facts} == facts
            assert (vars(one).keys(), str(one)) == (vars(error).keys(), str(error))


def test_every_error_of_ours_can_be_caught_as_one_and_the_page_names_the_kinds() -> None:
    ours = [value for name, value in vars(errors).items() if name.endswith("Error")]
    ours.remove(RankError)
    assert all(issubclass(kind, GpuPoolError) for kind in ours)
    assert issubclass(OptionsError, ValueError)
    root = Path(errors.__file__).parents[1]
    source = "".join(path.read_text() for path in root.rglob("*.py"))
    guide = root.parent / "docs" / "guides" / "faults.md"
    _, _, page = guide.read_text().partition("The kinds of")
    rows = [r.split("|") for r in page.splitlines() if re.match(r"\| `\w+Error` \| [^`]*`[a-z]", r)]
    kinds = {kind for row in rows for kind in re.findall("`([^`]+)`", row[2])} - {"reason"}
    assert len(kinds) > 20
    assert [kind for kind in sorted(kinds) if f'"{kind}"' not in source] == []
