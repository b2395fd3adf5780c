"""Reading images from S3: gpupool, the ceiling of the decoder, and the peers, in one run.

    python -m benchmarks.data [--images 1024] [--rounds 3] [--latency-ms 50] [--engines 1 2]
                              [--keys 50000]

The objects are photographs of 30-110 KB on a SeaweedFS server of this machine, which is asked
directly and through a proxy that adds the latency to every first byte. Where the machine has two
cores or more, the clients have one for themselves and the servers the others: the ceiling is then
that of one core, for all. Rounds are interleaved; a row is the median, CPU the client's own.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.data_ways import WAYS
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import SlowS3

BUCKET, FOLDER, NUM_TARS = "bench", "train", 4
SLOW_WAYS = {"DataLoader + s3fs open", "s3torchconnector"}  # one object after the other
READERS = [name for name in WAYS if name not in ("decode + resize alone", "webdataset")]


def photographs(number: int) -> dict[str, bytes]:
    """Path to JPEG: cuts of the photographs that come with scikit-image."""
    from skimage import data

    scenes = [Image.fromarray(scene()) for scene in (data.astronaut, data.coffee, data.chelsea)]
    scenes.append(Image.fromarray(data.rocket()))
    random = np.random.default_rng(0)
    images = {}
    for i in range(number):
        scene = scenes[i % len(scenes)]
        scale = random.uniform(1.0, 1.5) * max(500 / scene.width, 375 / scene.height)
        big = scene.resize((int(scene.width * scale) + 1, int(scene.height * scale) + 1))
        left, top = random.integers(big.width - 499), random.integers(big.height - 374)
        cut = np.asarray(big.crop((left, top, left + 500, top + 375))).astype(np.int16)
        grain = random.normal(0, random.uniform(4, 18), cut.shape)
        file = io.BytesIO()
        pixels = np.clip(cut + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=int(random.integers(80, 94)))
        images[f"{FOLDER}/class{i % 10}/{i:06d}.jpg"] = file.getvalue()
    return dict(sorted(images.items()))


def upload(server: SeaweedServer, images: dict[str, bytes]) -> None:
    """The images one by one, and again in tar files."""
    server.make_bucket(BUCKET)
    client = server.client()

    def put(item: tuple[str, bytes]) -> None:
        client.put_object(Bucket=BUCKET, Key=item[0], Body=item[1])

    tars = {}
    paths = list(images)
    for number in range(NUM_TARS):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in paths[number::NUM_TARS]:
                member = tarfile.TarInfo(path.rsplit("/", 1)[1])
                member.size = len(images[path])
                tar.addfile(member, io.BytesIO(images[path]))
        tars[f"tars/{number}.tar"] = file.getvalue()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, [*images.items(), *tars.items()]))


@dataclass
class Way:
    """A way to read, in `engines` processes that each read their part of the objects."""

    name: str
    job: dict[str, Any]
    engines: int
    environment: dict[str, str]
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        paths, number = self.job["paths"], self.engines
        for i in range(number):
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.data_ways", self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sys.stderr if os.environ.get("BENCH_SHOW") else subprocess.DEVNULL,
                text=True,
                env=self.environment,
                preexec_fn=lambda: os.sched_setaffinity(0, client_cores()),
            )
            first, last = len(paths) * i // number, len(paths) * (i + 1) // number
            tars = self.job["tars"][i::number]
            if self.name == "webdataset":  # it takes the tars as they come
                own = [p for t in range(i, NUM_TARS, number) for p in self.job["all"][t::NUM_TARS]]
            else:
                own = paths[first:last]
            job = {**self.job, "paths": own, "first": first, "tars": tars}
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            self.processes.append(process)
        for process in self.processes:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "ready\n":
                    break
            else:
                raise RuntimeError(f"{self.name} did not start; BENCH_SHOW=1 shows why")

    def run(self) -> None:
        """One pass in all processes at the same time."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for process in self.processes]
        num = sum(answer["num"] for answer in answers)
        self.rates.append(num / max(answer["wall_s"] for answer in answers))
        self.cpu_ms.append(1000 * sum(answer["cpu_s"] for answer in answers) / num)

    def stop(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait()


def client_cores() -> set[int]:
    return {min(os.sched_getaffinity(0))}


def server_cores() -> set[int]:
    cores = os.sched_getaffinity(0)
    return (cores - client_cores()) or cores


def measure(names: list[str], server: SeaweedServer, endpoint: str, **how: Any) -> list[Way]:
    environment = {
        **os.environ,
        **server.env,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    is_slow = endpoint != server.endpoint
    ways = []
    for name in names:
        paths = how["paths"]
        if is_slow and name in SLOW_WAYS:
            paths = paths[:64]
        job = {"bucket": BUCKET, "folder": FOLDER, "paths": paths, "all": how["paths"]}
        job |= {"decode": how["decode"]}
        job["tars"] = [f"s3://{BUCKET}/tars/{number}.tar" for number in range(NUM_TARS)]
        ways.append(Way(name, job, how["engines"], environment))
    try:
        for way in ways:
            way.start()
        for _ in range(how["rounds"]):
            for way in ways:
                way.run()
    finally:
        for way in ways:
            way.stop()
    return ways


def show(title: str, direct: list[Way], slow: list[Way], latency_ms: float) -> None:
    ceiling = next((way for way in direct if way.name == "decode + resize alone"), None)
    base = statistics.median(ceiling.rates) if ceiling else None
    print(f"\n### {title}\n")
    share = " | of the ceiling" if base else ""
    print(f"| way | images/s | CPU, ms an image{share} | with {latency_ms:g} ms | CPU{share} |")
    print("|---" * (7 if base else 5) + "|")
    for one, other in zip(direct, slow, strict=True):
        cells = [one.name]
        for way in (one, other):
            rate = statistics.median(way.rates)
            cells += [f"{rate:.0f}", f"{statistics.median(way.cpu_ms):.2f}"]
            if base:
                cells.append(f"{rate / base:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def list_many(server: SeaweedServer, number: int) -> None:
    """Seconds to list `number` keys of 50 classes at 40 ms a page."""
    from obstore.store import S3Store

    import gpupool

    server.make_bucket("many")
    store = S3Store(
        "many",
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=server.env["AWS_ACCESS_KEY_ID"],
        secret_access_key=server.env["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    keys = [f"c{i % 50:02d}/{i:07d}.jpg" for i in range(number)]
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda key: store.put(key, b"x"), keys))
    with SlowS3(server.endpoint, first_byte_ms=(40, 40)) as slow:
        os.environ.update(server.env, AWS_ENDPOINT_URL=slow.endpoint)
        for _ in range(3):
            wall, cpu = time.perf_counter(), time.process_time()
            found = gpupool.ImageDatastore("s3://many")
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"\n{len(found):,} keys listed at 40 ms a page: {wall:.2f} s, CPU {cpu:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--no-reading", action="store_true", help="leave reading alone out")
    parser.add_argument("--keys", type=int, default=0, help="also list so many keys")
    options = parser.parse_args()
    images = photographs(options.images)
    sizes = np.percentile([len(content) for content in images.values()], [5, 50, 95]) / 1000
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="gpupool-bench-")
    print(f"{len(images)} photographs of {sizes.round()} kB (5, 50, 95 %)")
    everything = os.sched_getaffinity(0)
    latency = (options.latency_ms, options.latency_ms)
    os.sched_setaffinity(0, server_cores())  # is inherited by the servers
    with SeaweedServer() as server, SlowS3(server.endpoint, first_byte_ms=latency) as slow:
        os.sched_setaffinity(0, everything)
        upload(server, images)
        how = {"paths": list(images), "rounds": options.rounds}
        for title, names, decode, numbers in (
            ("Read only, one process", READERS, False, [1]),
            ("Read, decode, resize to 224", list(WAYS), True, options.engines),
        ):
            for engines in numbers if decode or not options.no_reading else []:
                how |= {"decode": decode, "engines": engines}
                names = [name for name in names if name in options.only]
                direct = measure(names, server, server.endpoint, **how)
                behind = measure(names, server, slow.endpoint, **how)
                shown = f"{title}, {engines} processes" if decode else title
                show(shown, direct, behind, options.latency_ms)
        if options.keys:
            list_many(server, options.keys)


if __name__ == "__main__":
    main()
