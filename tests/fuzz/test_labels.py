"""Tables of labels that anybody may have written: read, or refused in one sentence."""

from __future__ import annotations

import io

import fsspec
import pandas
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpupool.core.errors import DataError
from gpupool.data.datastores.labels import class_names, label_files
from tests.fuzz.limits import fuzzed, only_our_errors
from tests.support.raising import raises

PATHS = ("a/1.png", "a/2.png", "b/3.png")
TABLE = pandas.DataFrame({"path": PATHS, "label": ["cat", "dog", "cat"]})
CSV = TABLE.to_csv(index=False).encode()


def parquet(**options: object) -> bytes:
    file = io.BytesIO()
    TABLE.to_parquet(file, index=False, **options)
    return file.getvalue()


def read(kind: str, table: bytes) -> None:
    """The labels that a table of this kind gives the files, and their classes."""
    fsspec.filesystem("memory").pipe(f"/labels/table.{kind}", table)
    url = f"memory://labels/table.{kind}"
    with only_our_errors():
        found = label_files(PATHS, lambda place: f"memory://labels/{PATHS[place]}", url)
        class_names(found, None, by_number=True)


def changed(whole: bytes) -> st.SearchStrategy[bytes]:
    """The same with some bytes changed, put in or cut away."""
    places = st.integers(0, len(whole))
    edits = st.lists(st.tuples(places, places, st.binary(max_size=8)), min_size=1, max_size=4)

    def edit(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = whole
        for at, length, new in edits:
            data = data[:at] + new + data[at + (length % 9) :]
        return data

    return edits.map(edit)


cells = st.one_of(st.sampled_from([*PATHS, "cat", "path", "label"]), st.text(max_size=12))
lines = st.lists(st.lists(cells, max_size=3).map(",".join), max_size=6).map("\n".join)


@fuzzed
@given(st.one_of(lines.map(lambda text: text.encode(errors="surrogatepass")), changed(CSV)))
@example(b"path,label\na/1.png," + b"7" * 5000)
@example(b'path,label\na/1.png,"' + b"x" * 200_000 + b'"')
@example(b"path,label\na/1.png,cat\x1b[2J\n")
@example(b"path\x1b[2J,la\x9bbel,more\n1,2,3")
@example(b"\xff\xfe\x00")
@example(b"\0,\0\n\0,\0")
@example(b"\n" * 100_000)
def test_csv_files(table: bytes) -> None:
    read("csv", table)


@pytest.mark.parametrize("whole", [parquet(), parquet(compression=None, use_dictionary=False)])
def test_parquet_files(whole: bytes) -> None:
    read("parquet", whole)

    @fuzzed
    @given(changed(whole))
    @example(whole[:-8])
    @example(b"PAR1" * 3)
    def try_one(table: bytes) -> None:
        read("parquet", table)

    try_one()


def test_a_class_that_would_steer_a_terminal_is_refused() -> None:
    with raises(DataError, "class name", shown=r"'cat\x1b[2J'"):
        class_names(["dog", "cat\x1b[2J"], None, by_number=False)
