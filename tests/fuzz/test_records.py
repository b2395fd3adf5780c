"""Files of the cache with any bytes in them: what was written is served, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpupool.data.cache.cache import DiskCache
from gpupool.data.cache.records import ENTRY, key_of
from gpupool.data.cache.writer import Writer
from gpupool.data.datastores import tar_index
from gpupool.data.datastores.compact_arrays import Texts
from tests.fuzz.limits import fuzzed, only_our_errors

WRITTEN = {key_of("record", number): bytes([number]) * 100 for number in range(4)}
LIMIT = 1 << 24
# Of an entry: the place in the data, the length, the checksum, each as wrong as it can be.
numbers = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 100, 399, 400, 2**63, 2**40]))
entries = st.lists(
    st.tuples(st.sampled_from([*WRITTEN]), numbers, numbers, numbers).map(
        lambda entry: np.array([(*entry[0], *entry[1:])], ENTRY).tobytes()
    ),
    max_size=5,
).map(b"".join)
changes = st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=4)


@fuzzed
@given(entries, st.binary(max_size=100), changes, st.integers(0, 400))
@example(np.array([(*key_of("record", 0), 2**64 - 1, 2**64 - 1, 0)], ENTRY).tobytes(), b"", [], 400)
def test_a_cache_serves_what_was_written_or_fetches_it(
    tmp_path_factory: pytest.TempPathFactory,
    more: bytes,
    torn: bytes,
    changes: list[tuple[int, int]],
    length: int,
) -> None:
    folder = tmp_path_factory.mktemp("records")
    writer = Writer(folder)
    for key, content in WRITTEN.items():
        assert writer.write(key, content, LIMIT)
    writer.close_files()
    (data,), (index,) = folder.glob("*.data"), folder.glob("*.index")
    content = bytearray(data.read_bytes())
    for at, value in changes:
        content[at] = value
    data.write_bytes(content[:length])
    index.write_bytes(index.read_bytes() + more + torn)
    with only_our_errors():
        cache = DiskCache(folder)
        for key, expected in WRITTEN.items():
            assert cache.read(key, lambda expected=expected: expected, LIMIT) == expected  # type: ignore[misc]
        assert cache.records.count()[0] >= len(WRITTEN)


@fuzzed
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    st.floats(0, 1),
    st.booleans(),
)
def test_a_kept_index_of_a_tar_is_read_or_made_anew(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[float, int]],
    share: float,
    is_whole: bool,
) -> None:
    path = tmp_path_factory.mktemp("indices") / "a.npz"
    kept = tar_index.TarIndex(
        Texts.of(["1.png", "1.cls"]), np.array([512, 1536]), np.array([9, 3]), Texts.of(["", "cat"])
    )
    tar_index._save(path, kept)
    data = bytearray(path.read_bytes())
    for at, value in changes:
        data[int(at * len(data))] = value
    path.write_bytes(data if is_whole else data[: int(share * len(data))])
    with only_our_errors():
        found = tar_index._load(path)
        assert found is None or [*found.names] == ["1.png", "1.cls"]
