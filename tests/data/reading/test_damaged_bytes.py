"""Bytes that change on their way, in a cache or in the store: read again, or told."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from gpupool import ImageDatastore
from gpupool.data.loading.loader import load_batches
from gpupool.data.reading.decode import decode
from gpupool.data.stores.retry import counts
from tests.servers.proxy import Fault
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import SlowS3


def flipped(data: bytes) -> bytes:
    """As the fault of this name makes it."""
    middle = len(data) // 2
    return data[:middle] + bytes(255 - byte for byte in data[middle:][:2]) + data[middle + 2 :]


def is_noticed(data: bytes) -> bool:
    """Whether libjpeg warns of it, and decodes it."""
    try:
        simplejpeg.decode_jpeg(data)
    except ValueError:
        return decode(data, "x") is not None
    return False


def pictures(number: int) -> list[bytes]:
    """JPEGs whose flipped form libjpeg only warns of."""
    draw, found = np.random.default_rng(0), list[bytes]()
    while len(found) < number:
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 255, (64, 64, 3), np.uint8)).save(file, "JPEG")
        found += [file.getvalue()] if is_noticed(flipped(file.getvalue())) else []
    return found


PICTURES = pictures(24)
EACH_ONCE = [Fault("flipped", match=f"/{number:02}.jpg", times=1) for number in range(0, 24, 2)]


@pytest.fixture(scope="module")
def slow(s3: SeaweedServer) -> Iterator[SlowS3]:
    s3.make_bucket("proof")
    s3.put_objects("proof", {f"in/a/{n:02}.jpg": data for n, data in enumerate(PICTURES)})
    with SlowS3(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def images(s3: SeaweedServer, slow: SlowS3) -> Iterator[ImageDatastore]:
    os.environ.update(s3.env, AWS_ENDPOINT_URL=slow.endpoint)
    yield ImageDatastore("s3://proof/in")
    slow.inject()


def test_what_changed_on_its_way_is_read_again(images: ImageDatastore, slow: SlowS3) -> None:
    slow.inject(*EACH_ONCE)
    before = counts.snapshot()
    batches = [np.arange(start, start + 8) for start in (0, 8, 16)]
    for batch, indices in zip(load_batches(images, batches), batches, strict=True):
        assert batch is not None
        for row, index in enumerate(indices):
            assert torch.equal(batch.inputs[row], decode(PICTURES[index], "x"))
    seen = counts.snapshot() - before
    assert (seen.retries, seen.last_reason) == (12, "changed on its way")


def test_a_cache_does_not_keep_it(images: ImageDatastore, slow: SlowS3, tmp_path: Path) -> None:
    kept = images.cached(limit_gib=0.1, folder=str(tmp_path))
    slow.inject(Fault("flipped", match=".jpg", times=1))
    assert torch.equal(kept[3][0], decode(PICTURES[3], "x"))
    slow.stats()
    assert torch.equal(kept[3][0], decode(PICTURES[3], "x"))
    assert slow.stats().get("requests", 0) == 0


def test_a_check_reads_again_what_its_etag_does_not_prove(
    images: ImageDatastore, slow: SlowS3
) -> None:
    slow.inject(*EACH_ONCE)
    before = counts.snapshot()
    assert images.check().summary == "All 24 images can be read."
    assert (counts.snapshot() - before).retries == 12


def test_a_check_tells_of_what_a_decoder_only_warns_of(
    images: ImageDatastore, s3: SeaweedServer
) -> None:
    stored = {"a/0.jpg": PICTURES[0], "a/1.jpg": flipped(PICTURES[1]), "a/2.jpg": b"no image"}
    s3.put_objects("proof", {f"bad/{name}": data for name, data in stored.items()})
    before = counts.snapshot()
    result = ImageDatastore("s3://proof/bad").check()
    assert [bad.reason for bad in result] == ["doubtful", "damaged"]
    assert "can be decoded, with a warning: Corrupt JPEG data" in result[0].detail
    assert result.good.tolist() == [True, False, False]
    assert result.summary == (
        "1 of 3 images cannot be used: 1 damaged. 1 doubtful: their decoder warns of damage."
    )
    seen = counts.snapshot() - before
    assert (seen.reads, seen.retries) == (3, 0)  # their ETags prove that they lie there so


def test_local_files_are_told_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number, data in enumerate((PICTURES[0], flipped(PICTURES[1]))):
        (tmp_path / f"a/{number}.jpg").write_bytes(data)
    images = ImageDatastore(str(tmp_path))
    result = images.check()
    assert [bad.reason for bad in result] == ["doubtful"]
    assert result.summary.startswith("All 2 images can be read. 1 doubtful")
    assert images[1][0].shape == (3, 64, 64)
