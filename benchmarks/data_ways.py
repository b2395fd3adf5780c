"""Ways to read the same JPEGs from S3, each for a process of its own; `benchmarks/data.py` runs it.

    python -m benchmarks.data_ways NAME < {"url": ..., "paths": [...], "tars": ..., "decode": true}

Answers "ready" after one untimed pass, then for every line "go" a line of JSON: seconds by the
clock and of CPU (own, all threads) for all images once. With `decode` every way makes the same
uint8 batches of 64 x 3 x 224 x 224 with the same decoder, resize and crop: they differ in how they
read. Without, it only reads.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision.transforms import v2

import gpupool
from gpupool.data.reading.decode import decode
from gpupool.data.reading.loader import load_batches

BATCH, THREADS = 64, 64
Pass = Callable[[], int]  # reads all images once; how many there were
resize = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])


def finish(data: bytes) -> Any:
    """What each way does with the bytes of an image: a picture, or their number."""
    return resize(decode(data, "an image")) if job["decode"] else len(data)


def collate(samples: list[Any]) -> Any:
    return torch.stack(samples) if job["decode"] else samples


class Keys(Dataset[Any]):
    """A map-style data set over the objects; a way fills in how it reads."""

    def __len__(self) -> int:
        return len(job["paths"])


def with_dataloader(dataset: Dataset[Any]) -> Pass:
    batches: Iterable[Any] = DataLoader(dataset, BATCH, collate_fn=collate)
    return lambda: sum(len(batch) for batch in batches)


def s3fs_open() -> Pass:
    """What the tutorials do."""
    import s3fs

    filesystem = s3fs.S3FileSystem(use_listings_cache=False)

    class Open(Keys):
        def __getitem__(self, index: int) -> Any:
            with filesystem.open(job["bucket"] + "/" + job["paths"][index]) as file:
                return finish(file.read())

    return with_dataloader(Open())


def s3fs_cat() -> Pass:
    import s3fs

    filesystem = s3fs.S3FileSystem()

    class Cat(Keys):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            paths = [job["bucket"] + "/" + job["paths"][index] for index in indices]
            found = filesystem.cat(paths, batch_size=THREADS)
            return [finish(found[path]) for path in paths]

    return with_dataloader(Cat())


def s3torchconnector() -> Pass:
    from s3torchconnector import S3ClientConfig, S3MapDataset

    objects: Any = S3MapDataset.from_objects(
        [f"s3://{job['bucket']}/{path}" for path in job["paths"]],
        region="us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
        transform=lambda reader: finish(reader.read()),
    )
    return with_dataloader(objects)


def webdataset() -> Pass:
    """The same images in tar files, streamed one after the other."""
    import fsspec
    import webdataset as wds
    from webdataset.gopen import gopen_schemes

    gopen_schemes["s3"] = lambda url, mode="rb", bufsize=8192, **_: fsspec.open(url, "rb").open()

    class Shards(IterableDataset[Any]):
        def __iter__(self) -> Any:
            found = wds.WebDataset(
                job["tars"], shardshuffle=False, nodesplitter=None, empty_check=False
            )
            return (finish(sample["jpg"]) for sample in found)

    return with_dataloader(Shards())


def litdata_raw() -> Pass:
    import litdata.streaming.downloader as downloader
    from litdata import StreamingRawDataset

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # there is no option for it
    raw: Any = StreamingRawDataset(
        f"s3://{job['bucket']}/{job['folder']}",
        cache_dir=tempfile.mkdtemp(),
        cache_files=False,
        recompute_index=True,
    )

    class Raw(Keys):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [finish(bytes(data)) for data in raw.__getitems__(list(indices))]

    return with_dataloader(Raw())


def datastore() -> Any:
    return gpupool.ImageDatastore(f"s3://{job['bucket']}/{job['folder']}").with_transform(resize)


def ours(dataset: Any) -> Pass:
    places = range(job["first"], job["first"] + len(job["paths"]))
    if not job["decode"]:
        threads = ThreadPoolExecutor(THREADS)
        return lambda: len(list(threads.map(dataset.fetch, places)))
    cuts = range(0, len(places), BATCH)
    batches = [np.array(places[cut : cut + BATCH], dtype=np.int64) for cut in cuts]

    def read_all() -> int:
        return sum(batch.num for batch in load_batches(dataset, batches) if batch)

    return read_all


def gpupool_cached() -> Pass:
    return ours(datastore().cached(limit_gib=1, folder=tempfile.mkdtemp()))


def ceiling() -> Pass:
    """No reading: the bytes are at hand."""
    dataset = datastore()
    contents = [dataset.fetch(job["first"] + index) for index in range(len(job["paths"]))]

    class Contents(Keys):
        def __getitem__(self, index: int) -> Any:
            return dataset.decode(index, contents[index], None)[0]

    return with_dataloader(Contents())


WAYS: dict[str, Callable[[], Pass]] = {
    "decode + resize alone": ceiling,
    "gpupool": lambda: ours(datastore()),
    "gpupool, second epoch from its cache": gpupool_cached,
    "litdata raw": litdata_raw,
    "s3torchconnector": s3torchconnector,
    "webdataset": webdataset,
    "DataLoader + s3fs cat": s3fs_cat,
    "DataLoader + s3fs open": s3fs_open,
}
job: dict[str, Any] = {}


def main() -> None:
    torch.set_num_threads(1)
    job.update(json.loads(sys.stdin.readline()))
    read_all = WAYS[sys.argv[1]]()
    assert read_all() == len(job["paths"])
    print("ready", flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        num = read_all()
        measured = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps({**measured, "num": num}), flush=True)
    os._exit(0)  # some of the libraries do not let go of their threads


if __name__ == "__main__":
    main()
