"""JPEGs decoded a batch at a time: on the CPU by the same code as on a GPU, and on a GPU."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from gpupool.core.errors import DataError, OptionsError, SampleError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.datastores.preview import small_png
from gpupool.data.device import Aside
from gpupool.data.loading.loader import load_batches
from gpupool.data.reading import gpu_decode
from gpupool.data.reading.collate import Batch
from gpupool.data.reading.gpu_decode import decode_many, read_on_gpu, require_decoder
from gpupool.data.reading.pipeline import THREAD_NAME, Reading
from gpupool.data.reading.samples import Draw, Skipped
from gpupool.data.reading.subsets import opened
from gpupool.data.segmentation.datastore import SegmentationDatastore
from tests.data.reading.points import first, full, join_loaders
from tests.support.beside import watched
from tests.support.raising import raises

CPU = torch.device("cpu")
NUM = 40


def image_file(index: int, kind: str = "JPEG", mode: str = "RGB", orientation: int = 1) -> bytes:
    y, x = np.mgrid[0:24, 0:32]
    pixels = np.stack([x * 8, y * 10, (x + y + 5 * index) % 256], axis=-1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, exif=exif)
    return out.getvalue()


def plain(index: int) -> bytes:
    return image_file(index, mode="L" if index % 7 == 0 else "RGB")


ODD = {
    1: image_file(1, "PNG"),
    2: image_file(2, mode="CMYK"),
    3: image_file(3, orientation=3),
    4: plain(4) + b"\0",  # more than a JPEG
}


def fill(root: Path, contents: dict[int, bytes]) -> ImageDatastore:
    for index, content in contents.items():
        path = root / "ab"[index % 2] / f"{index:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return ImageDatastore(str(root), labels=lambda url: url[-6:-4])


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> ImageDatastore:
    contents = {index: plain(index) for index in range(NUM)} | ODD
    return fill(tmp_path_factory.mktemp("images"), contents)


@pytest.fixture
def damaged(tmp_path: Path) -> ImageDatastore:
    """Samples 0..11 are a/00, a/02, ..., b/01, ...: 5 (a/10) is cut, 8 (b/05) wrong inside."""
    contents = {index: plain(index) for index in range(12)}
    contents[10] = contents[10][:-200]
    contents[5] = contents[5][:-200] + b"\xff\xd9"  # only a decoder can tell
    return fill(tmp_path, contents)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    join_loaders()


def same(found: list[Batch], expected: list[Batch]) -> bool:
    skipped = [[sorted(batch.skipped) for batch in batches] for batches in (found, expected)]
    return skipped[0] == skipped[1] and all(
        torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        for one, other in zip(found, expected, strict=True)
        if one.num and other.num
    )


def orders(num: int, *cuts: int) -> list[np.ndarray]:
    return np.split(np.random.default_rng(0).permutation(num), cuts)


def noisy(image: torch.Tensor) -> torch.Tensor:
    crop: torch.Tensor = v2.RandomCrop(16)(image)
    return crop.float() + torch.rand_like(crop, dtype=torch.float32)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_batches_are_those_of_the_loader_bit_for_bit(ds: ImageDatastore, depth: int) -> None:
    wanted = orders(NUM, 16, 16, 17, 33)  # one of them is empty
    for data in (ds, ds.with_transform(noisy)):
        expected = list(load_batches(data, wanted, draw=Draw(0, 3)))
        found = list(read_on_gpu(data, wanted, Reading(depth, draw=Draw(0, 3))))
        assert [batch is None for batch in found] == [False, True, False, False, False]
        assert same(full(iter(found)), full(iter(expected)))


def test_pictures_are_those_of_torchvision(ds: ImageDatastore) -> None:
    buffers = [torch.frombuffer(bytearray(plain(i)), dtype=torch.uint8) for i in range(8)]
    expected = decode_jpeg(buffers, mode=ImageReadMode.RGB)
    found = decode_many([plain(i) for i in range(8)], ["x"] * 8, CPU, Aside())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_plain_jpegs_go_to_the_decoder_of_the_device_and_others_are_copied() -> None:
    # torchvision takes any device but CUDA for the CPU, so what has been copied can be told
    meta = torch.device("meta")
    found = decode_many([plain(0), *ODD.values(), plain(1)], ["x"] * 6, meta, Aside())
    kinds = [image.device.type for image in found if isinstance(image, torch.Tensor)]
    assert kinds == ["cpu", *["meta"] * 4, "cpu"]
    at = plain(1).index(b"\xff\xda") + 5
    broken = plain(1)[:at] + b"\xff" + plain(1)[at + 1 :]  # of a component that is not there
    first_one, error = decode_many([plain(0), broken], ["x", "y"], meta, Aside())
    assert isinstance(first_one, torch.Tensor)
    assert first_one.device == meta
    assert isinstance(error, SampleError)
    assert error.url == "y"


def test_what_is_no_plain_jpeg_is_not_for_the_device() -> None:
    assert all(gpu_decode._is_for_device(plain(index)) for index in range(8))
    others = [*ODD.values(), plain(0)[:-50], plain(0)[:30], b"", b"text", b"\xff\xd8\xff\xd9"]
    assert not any(map(gpu_decode._is_for_device, others))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_damaged_file_in_a_batch_is_named(damaged: ImageDatastore, depth: int) -> None:
    wanted = [np.arange(4), np.arange(4, 12)]
    reads = read_on_gpu(damaged, wanted, Reading(depth))
    assert first(reads).num == 4
    with raises(SampleError, "damaged", shown="/a/10.jpg ", url=damaged.paths[5]):
        next(reads)
    with raises(SampleError, "damaged", shown="/b/05.jpg "):
        next(read_on_gpu(damaged, [np.arange(6, 12)], Reading(depth)))


def test_skipped_are_the_damaged_and_the_missing(damaged: ImageDatastore) -> None:
    Path(damaged.paths[7]).unlink()
    wanted = [np.array([0, 5, 1]), np.array([7, 6, 8]), np.array([5, 8, 7]), np.array([2, 3])]
    found = full(read_on_gpu(damaged, wanted, Reading(skip=True)))
    assert same(found, full(load_batches(damaged, wanted, skip=True)))
    assert [batch.num for batch in found] == [2, 1, 0, 2]
    assert found[0].skipped == (Skipped(damaged.paths[5], "damaged"),)
    assert set(found[2].skipped) == {
        Skipped(damaged.paths[5], "damaged"),
        Skipped(damaged.paths[8], "damaged"),
        Skipped(damaged.paths[7], "missing"),
    }


def test_an_error_of_the_transform_comes_out_and_sizes_must_agree(ds: ImageDatastore) -> None:
    broken = ds.with_transform(lambda image: image / [])
    with pytest.raises(TypeError, match="unsupported operand"):
        next(read_on_gpu(broken, [np.arange(5)], Reading()))
    sizes = iter(range(10, 20))
    varied = ds.with_transform(lambda image: image[:, :, : next(sizes)])
    with raises(DataError, "sizes", shown="(3 x 24 x 10, 3 x 24 x 11)"):
        next(read_on_gpu(varied, [np.arange(5)], Reading()))


def test_leaving_early_ends_all_threads(ds: ImageDatastore) -> None:
    reads = read_on_gpu(ds, orders(NUM, *range(2, NUM, 2)), Reading())
    assert first(reads).num == 2
    reads.close()
    join_loaders()


def test_small_batches_are_fetched_far_ahead_within_the_memory_allowed(ds: ImageDatastore) -> None:
    pairs = orders(NUM, *range(2, NUM, 2))
    assert gpu_decode._depth(ds, pairs, Reading(2)) == 64
    two = max(ds.num_bytes(int(a)) + ds.num_bytes(int(b)) for a, b in pairs)
    assert gpu_decode._depth(ds, pairs[:1], Reading(2, max_bytes=5 * two)) in range(5, 64)
    assert gpu_decode._depth(ds, pairs, Reading(2, max_bytes=1)) == 2
    assert gpu_decode._depth(ds, [np.arange(0)], Reading(2)) >= 2


def test_it_is_a_setting_of_a_datastore(ds: ImageDatastore) -> None:
    assert ds.decoding == "cpu"
    auto = ds.decoded_on("auto")
    assert pickle.loads(pickle.dumps(auto.subset([1, 2]))).decoding == "auto"
    assert auto.relist().decoding == "auto"
    assert auto.concat(auto).decoding == "auto"
    assert (auto.decoded_on("cpu").decoding, ds.decoding) == ("cpu", "cpu")
    with raises(OptionsError, "other settings"):
        auto.concat(ds)
    with raises(OptionsError, "unknown", "place"):
        ds.decoded_on("gpu")  # type: ignore[arg-type]


def test_parts_of_torch_datasets_are_decoded_so_too(ds: ImageDatastore) -> None:
    data = ds.with_transform(noisy).decoded_on("cuda")
    nested: Any = opened(ConcatDataset([Subset(data, [3, 1, 4]), Subset(data, [1, 5])]))
    with raises(OptionsError, "no GPU", "place"):
        load_batches(nested, [np.arange(5)])
    found = full(read_on_gpu(nested, [np.arange(5)], Reading(draw=Draw(0, 1))))
    here = [nested.decode(index, nested.fetch(index), Draw(0, 1)) for index in range(5)]
    assert torch.equal(found[0].inputs, torch.stack([image for image, _ in here]))
    with raises(DataError, "other settings", "decoding"):
        _ = opened(ConcatDataset([data, ds])).decoding


def test_pairs_are_decoded_on_the_cpu(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(image_file(1, "PNG", "L"))
    pairs = SegmentationDatastore(str(tmp_path / "images"), str(tmp_path / "masks"))
    assert pairs.decoded_on("cpu").decoding == "cpu"
    with raises(OptionsError, "no effect", "place"):
        pairs.decoded_on("auto")


def test_auto_is_the_cpu_and_cuda_without_a_gpu_an_error(ds: ImageDatastore) -> None:
    wanted = orders(NUM, 20)
    found = full(load_batches(ds.decoded_on("auto"), wanted))
    assert same(found, full(load_batches(ds, wanted)))
    with raises(OptionsError, "no GPU", "place"):
        load_batches(ds.decoded_on("cuda"), wanted)


def test_a_device_that_cannot_decode_says_why() -> None:
    assert gpu_decode.why_not_on(CPU) == ""
    nowhere = torch.device("cuda", 99)
    assert gpu_decode.why_not_on(nowhere).startswith("JPEGs cannot be decoded on cuda:99 (")
    with raises(OptionsError, "no GPU", "place", shown=" cuda:99 ("):
        require_decoder(nowhere)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_is_made_aside_in_an_empty_stream_and_taken_before_use(
    ds: ImageDatastore, depth: int
) -> None:
    data, wanted = ds.with_transform(noisy), orders(NUM, 16, 16, 33)
    expected = full(load_batches(data, wanted, draw=Draw(0, 3)))
    with watched() as cpu:
        # once more: a second reading uses the stream of the first, and its memory
        for _ in range(2):
            found = full(read_on_gpu(data, wanted, Reading(depth, draw=Draw(0, 3))))
            assert same(found, expected)  # what is not taken is poison
    assert cpu.num_streams == 1
    here, decoder = (cpu.steps[name] for name in (threading.current_thread().name, THREAD_NAME))
    assert here.count("take") == 6
    made = decoder if depth else here
    before = [made[at - 1] for at, step in enumerate(made) if step == "decode"]
    assert before == ["empty"] * 6
    order = ["empty", "decode", "hand over"] + ["take"] * (depth == 0)
    assert [step for step in made if step != "work"] == order * 6


_SHORT_OF_MEMORY = """
import resource, torch
from pathlib import Path
from gpupool.data.reading.gpu_decode import decode_many
from tests.support.beside import watched
pixels = torch.zeros(3, 6000, 6000, dtype=torch.uint8)
files = [torch.ops.image.encode_jpeg(pixels, 75).numpy().tobytes()]
with watched() as cpu:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
    try:
        decode_many(files, ["x"], torch.device("cpu"), cpu.aside())
    except torch.OutOfMemoryError as error:
        print(*cpu.steps.values(), str(error).split(";")[0], "DefaultCPUAllocator" in str(error))
"""


def test_a_shortage_of_memory_is_no_damaged_file() -> None:
    # a real one, of the CPU: its memory is limited, and the file is as good as any
    script = [sys.executable, "-c", _SHORT_OF_MEMORY]
    run = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    said = "CPU: no memory to decode 1 JPEGs of a batch"
    assert run.stdout.strip() == f"['empty', 'free', 'empty'] {said} True"


def test_nothing_warns_of_torchvision() -> None:
    # where warnings are errors, each would be a "damaged" file
    webp = image_file(1, "WEBP")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu_decode.why_not_on(CPU) == ""
        made = decode_many([plain(0), webp], ["x"] * 2, CPU, Aside())
        assert small_png(torch.zeros(3, 4, 4, dtype=torch.uint8))
    assert all(isinstance(image, torch.Tensor) for image in made)


@pytest.mark.parametrize(
    ("words", "is_shortage"),
    [
        # torchvision 0.26: the allocator's words; 0.29: the call that has failed; and nvJPEG's
        ("Error while decoding JPEG images: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ('torch_call_dispatcher("aten::empty", "memory_format") API call failed at ops.h', True),
        ("Error while decoding JPEG images: Failed to decode batch: 5", True),
        ("Failed to initialize nvjpeg with hardware backend: 5", True),
        ("Error while decoding JPEG images: Failed to decode jpeg stream: 3", False),
        ("Error while decoding JPEG images: Failed to get image info: 2", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_what_nvjpeg_says_of_memory_is_known(words: str, is_shortage: bool) -> None:
    assert gpu_decode._is_shortage(RuntimeError(words)) == is_shortage


@pytest.mark.gpu
def test_a_gpu_makes_the_same_pictures_but_for_rounding(ds: ImageDatastore) -> None:
    data = ds.with_transform(v2.RandomCrop(16)).decoded_on("cuda")
    wanted = orders(NUM, *range(4, NUM, 4))
    found = full(load_batches(data, wanted, device="cuda", draw=Draw(0, 1)))
    expected = full(load_batches(data.decoded_on("auto"), wanted, device="cuda", draw=Draw(0, 1)))
    assert {batch.inputs.device.type for batch in found} == {"cuda"}
    assert all(batch.inputs.is_pinned() for batch in expected)
    for one, other in zip(found, expected, strict=True):
        differences = (one.inputs.cpu().int() - other.inputs.int()).abs()
        assert differences.float().mean() < 2
        assert torch.equal(one.targets, other.targets)


@pytest.mark.gpu
def test_a_damaged_file_in_a_batch_of_a_gpu_is_named(damaged: ImageDatastore) -> None:
    data, cut = damaged.decoded_on("cuda"), [np.array([0, 5, 1])]
    with raises(SampleError, "damaged", shown="/a/10.jpg "):
        next(load_batches(data, cut, device="cuda"))
    batch = first(load_batches(data, cut, device="cuda", skip=True))
    assert (batch.num, batch.inputs.device.type) == (2, "cuda")
    assert batch.skipped == (Skipped(damaged.paths[5], "damaged"),)
