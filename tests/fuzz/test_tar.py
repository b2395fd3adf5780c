"""Tars that anybody may have made, and kept indices: used, or refused in one sentence."""

from __future__ import annotations

import tarfile

import fsspec
from hypothesis import example, given
from hypothesis import strategies as st

from gpupool.data.datastores.tar import TarDatastore
from tests.data.pictures import image_file
from tests.fuzz.limits import fuzzed, only_our_errors

GOOD = {"1.png": image_file(1), "1.cls": b"cat"}


def negative(size: int) -> bytes:
    """The field of a size below zero: base 256, two's complement."""
    return (-size % 256**12).to_bytes(12, "big")


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, size: bytes = b""
) -> bytes:
    """A header whose checksum is right, with any 12 bytes as `size`, and what follows it."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape"))
    if size:
        header[124:136] = size.ljust(12, b"\0")[:12]
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header) + content + bytes(-len(content) % 512)


def record(keyword: str, value: str) -> bytes:
    """One of a pax header, which begins with its own length."""
    rest = f" {keyword}={value}\n".encode(errors="surrogateescape")
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return str(length).encode() + rest


WHOLE = b"".join(member(name, content) for name, content in GOOD.items()) + bytes(1024)
sizes = st.one_of(
    st.just(b""),
    st.integers(1, 2**40).map(negative),
    st.integers(0, 2**88 - 1).map(lambda size: b"\x80" + size.to_bytes(11, "big")),
    st.binary(min_size=12, max_size=12),
)
keywords = st.sampled_from(
    ["path", "size", "hdrcharset", "GNU.sparse.realsize", "GNU.sparse.size", "GNU.sparse.map",
     "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.name", "linkpath", "mtime"]
)  # fmt: skip
values = st.one_of(st.integers(-(2**70), 2**70).map(str), st.text(max_size=20))
contents = st.one_of(
    st.binary(max_size=600),
    st.lists(st.builds(record, keywords, values), max_size=4).map(b"".join),
)
names = st.one_of(st.sampled_from([*GOOD, "a/b.cls", "././@LongLink"]), st.text(max_size=30))
kinds = st.sampled_from([b"0", b"0", b"x", b"g", b"X", b"L", b"K", b"S", b"1", b"5", b"\xff"])
tars = st.lists(st.builds(member, names, contents, kinds, sizes), max_size=6).map(b"".join)


def index(tar: bytes) -> None:
    fsspec.filesystem("memory").pipe("/fuzz/a.tar", tar)
    with only_our_errors():
        TarDatastore("memory://fuzz/a.tar").fetch(0)


@fuzzed
@given(tars, st.booleans())
@example(member("p", record("path", "x") * 3, b"x") * 2000, True)
@example(member("p", b"\n" * 40_000_000, b"x"), True)
@example(member("a/" * 2000 + "b"), True)
def test_headers_of_any_kind(tar: bytes, after_a_good_one: bool) -> None:
    index((WHOLE[:-1024] if after_a_good_one else b"") + tar + bytes(1024))
