"""The ranks of a host share a cache, and one of them is killed while all fill and read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpupool import ImageDatastore, Pool, SpmdError
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises


def read_all(ds: ImageDatastore, killed_rank: int | None) -> tuple[int, int, int]:
    """Reads all images; one rank is killed in the middle of it.

    How many came from the store, from the disk, and the checksum of all.
    """
    import os
    import signal
    import threading
    import zlib
    from concurrent.futures import ThreadPoolExecutor

    import torch.distributed as dist

    from gpupool.data.stores.retry import counts

    for thread in threading.enumerate():
        if thread.name.startswith("reads"):  # of a call that was interrupted
            thread.join()
    before, check = counts.snapshot(), 0
    order = range(len(ds)) if dist.get_rank() == 0 else reversed(range(len(ds)))
    with ThreadPoolExecutor(8, "reads") as pool:
        for number, data in enumerate(pool.map(ds.fetch, order)):
            check ^= zlib.crc32(data)
            if number == 60 and dist.get_rank() == killed_rank:
                os.kill(os.getpid(), signal.SIGKILL)
    done = counts.snapshot() - before
    return done.reads, done.cached_reads, check


def test_a_rank_that_is_killed_leaves_the_cache_to_the_others(
    pool2: Pool, photos_url: str, s3: SeaweedServer, tmp_path: Path
) -> None:
    ds = ImageDatastore(f"{photos_url}/train", storage_options=s3.storage_options)
    cached = ds.cached(limit_gib=1, folder=str(tmp_path))
    with raises(SpmdError, "SIGKILL", ename="EngineDiedError"):
        pool2.run(read_all, cached, 1)
    expected = pool2.run(read_all, ds, None)[0][2]

    def on_both() -> list[Any]:
        done = pool2.run(read_all, cached, None)
        return [done[0], done[1]]

    for reads, hits, check in on_both():
        assert (reads + hits, check) == (200, expected)
        assert hits > 50
    assert on_both() == [(0, 200, expected)] * 2
