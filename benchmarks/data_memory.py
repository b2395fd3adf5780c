"""200,000 small images through the loader: the memory it takes must not grow.

    python benchmarks/data_memory.py [NUM_SAMPLES]

One process, several epochs over the same JPEG files (28 x 28 photographs, held in memory: the store
is not what is measured), each fetched, decoded, augmented with keyed random numbers and batched.
Prints resident memory, threads and descriptors after some of the epochs, and CPU per
sample. What threads take from the allocator levels off after some thirty epochs.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import sys
import threading

import numpy as np
import psutil
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from demo import photos
from gpupool.core.errors import SampleError
from gpupool.data.loading.ways import load_batches
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.decode import decode
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import epoch_order, global_batches

EPOCHS = 40
REPORT_EVERY = 4
BATCH_SIZE = 256
NUM_FILES = 1000  # different ones; every 997th sample is damaged
MIB = 1 << 20


class Photographs:
    """Samples in two parts, from files in memory."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.files = [_jpeg(image) for image in photos.source().train.images[:NUM_FILES]]
        self.transform = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(28, padding=2)])

    def __len__(self) -> int:
        return self.num

    def num_bytes(self, index: int) -> int:
        return len(self.files[index % NUM_FILES])

    def fetch(self, index: int) -> bytes:
        if index % 997 == 0:
            raise SampleError(f"photo {index} is missing", f"memory/{index}", "missing")
        return bytes(bytearray(self.files[index % NUM_FILES]))  # a new one, as a store gives

    def decode(self, index: int, fetched: bytes, draw: Draw | None) -> tuple[Tensor, int]:
        with keyed_draws(draw, index):
            return self.transform(decode(fetched, f"memory/{index}")), index


def main() -> None:
    """Print the table."""
    num_samples = int(sys.argv[1]) if sys.argv[1:] else 200_000
    data = Photographs(num_samples // EPOCHS)
    print("| samples | resident, MiB | threads | descriptors | CPU, ms a sample |")
    print("|---|---|---|---|---|")
    for epoch in range(1, EPOCHS + 1):
        before = _cpu_s()
        batches = global_batches(epoch_order(len(data), 0, epoch), BATCH_SIZE)
        seen = 0
        for batch in load_batches(data, batches, draw=Draw(0, epoch), skip=True):
            assert batch is not None
            seen += batch.num + len(batch.skipped)
        assert seen == len(data)
        if epoch % REPORT_EVERY:
            continue
        cpu_ms = 1000 * (_cpu_s() - before) / len(data)
        gc.collect()
        process = psutil.Process()
        resident = process.memory_info().rss / MIB
        print(
            f"| {epoch * len(data):,} | {resident:.1f} | {threading.active_count()} "
            f"| {len(os.listdir('/proc/self/fd'))} | {cpu_ms:.2f} |",
            flush=True,
        )


def _jpeg(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert("RGB").save(file, "JPEG", quality=90)
    return file.getvalue()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
