"""JPEGs decoded by the GPU (nvJPEG), a batch at a time: `ds.decoded_on("cuda")`. Runs on engines.

    fetch threads ──> batches of contents ──> one thread: decode all, transform ──> batches

What nvJPEG is not given (PNGs, CMYK, pictures that lie on their side, files that do not end as a
JPEG does) is decoded on the CPU and copied.

torchvision lets nvJPEG write on a stream of its own, which waits for no other one (read in its
decode_jpegs_cuda.cpp; pytorch/vision#9606). Memory that a training has freed is still read by the
steps that the host has queued. So the decoding thread works aside, where torch gives it memory that
no training has used, and that stream is empty before nvJPEG writes.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data import device as devices
from gpupool.data.device import Aside, Handover
from gpupool.data.reading.collate import Batch, PendingBatch
from gpupool.data.reading.cpu_loader import read_ahead, read_here
from gpupool.data.reading.decode import RGB, decode
from gpupool.data.reading.image_headers import MAX_PIXELS, read_header
from gpupool.data.reading.pipeline import (
    MIN_ROWS_AHEAD,
    Reading,
    read_in_threads,
    result_of,
)
from gpupool.data.reading.samples import Draw, Samples
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import tensors

Batches = Generator[Batch | None, None, None]

# What is said of memory: by torch's allocator, which torchvision repeats (0.26) or of which it says
# only what it has called (0.29); nvjpegStatus_t 5 is NVJPEG_STATUS_ALLOCATOR_FAILURE.
_SHORTAGE = re.compile(r"out of memory|can't allocate memory|aten::empty|Failed to [\w ]+: 5\b")


class Pictures(Samples, Protocol):
    """Samples whose `fetch` gives an image file, and whose `decode` is `decode`, then `finish`."""

    def name(self, index: int) -> str:
        """The printable URL of an image."""

    def finish(self, index: int, image: torch.Tensor, draw: Draw | None) -> tuple[Any, Any]:
        """The sample of a decoded image: transformed on the device where it lies, and its label."""


def require_decoder(device: torch.device) -> None:
    """Raises OptionsError if `device` is no GPU that decodes JPEGs."""
    why_not = "this rank has no GPU" if device.type != "cuda" else why_not_on(device)
    if why_not:
        raise OptionsError(
            f'decoded_on("cuda"): {why_not}; use decoded_on("auto") or "cpu"', "no GPU", "place"
        )


def why_not_on(device: torch.device) -> str:
    """Why `device` decodes not even a plain JPEG, so that no file is blamed for it; "" if it does.

    The first call makes the decoder, which takes a moment. Raises torch.OutOfMemoryError.
    """
    smallest = torch.ops.image.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8), 75)
    try:
        with devices.borrowed_aside(device) as aside:
            _decoded([smallest], device, aside)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"JPEGs cannot be decoded on {device} ({str(error).splitlines()[0]})"
    return ""


def read_on_gpu(dataset: Pictures, batches: Sequence[Indices], reading: Reading) -> Batches:
    """As `load_batches`, with inputs that `reading.device` decodes and that lie there."""
    reads = _decode_all(dataset, batches, reading)
    if reading.depth:
        reads = read_ahead(reads, len(batches), reading)
    with closing(reads):
        for read in reads:
            # In the thread that asked, whose stream uses the batch from here on.
            read.handover.take()
            batch = read.batch
            del read
            yield batch
            del batch  # it is the caller's now


def decode_many(
    contents: Sequence[bytes], names: Sequence[str], device: torch.device, aside: Aside
) -> list[torch.Tensor | SampleError]:
    """For each image file its picture on `device`, as `decode` makes it, or what is wrong with it.

    Plain JPEGs in one call, in the stream `aside` that was entered. If that fails, the CPU decodes
    all: the device does not say which of them is damaged. Raises what else the device raises, such
    as torch.OutOfMemoryError.
    """
    plain = [place for place, data in enumerate(contents) if _is_for_device(data)]
    found: dict[int, torch.Tensor | SampleError] = {}
    # bytearray: torch warns about tensors over read-only memory.
    buffers = [torch.frombuffer(bytearray(contents[at]), dtype=torch.uint8) for at in plain]
    try:
        made = _decoded(buffers, device, aside) if buffers else []
        found.update(zip(plain, made, strict=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a damaged file gets its name below; a broken device fails there again
        pass
    for at in range(len(contents)):
        if at in found:
            continue
        try:
            found[at] = decode(contents[at], names[at]).to(device)
        except SampleError as error:
            found[at] = error
    return [found[at] for at in range(len(contents))]


def _decoded(buffers: list[torch.Tensor], device: torch.device, aside: Aside) -> list[torch.Tensor]:
    """JPEGs as RGB pictures. Raises torch.OutOfMemoryError, or RuntimeError for anything else."""
    here = devices.of(device)
    for is_last in (False, True):
        aside.synchronize()
        try:
            if device.type == "cuda":
                return list(torch.ops.image.decode_jpegs_cuda(buffers, RGB, device))
            return [torch.ops.image.decode_jpeg(buffer, RGB) for buffer in buffers]
        except RuntimeError as error:
            # nvJPEG may still write into pictures that are freed by this error
            here.synchronize()
            if not _is_shortage(error):
                raise
            if is_last:
                raise torch.OutOfMemoryError(
                    f"{here.name}: no memory to decode {len(buffers)} JPEGs of a batch; take a "
                    f'smaller batch_size, or decoded_on("cpu") ({str(error).splitlines()[0]})'
                ) from None
            here.free_cache()  # nvJPEG takes its own memory, and knows nothing of torch's
    raise AssertionError


def _is_shortage(error: RuntimeError) -> bool:
    """Whether it is of memory: torchvision says RuntimeError of whatever nvJPEG reports."""
    return isinstance(error, torch.OutOfMemoryError) or bool(_SHORTAGE.search(str(error)))


def _is_for_device(data: bytes) -> bool:
    """A plain, upright JPEG that is not cut off: nvJPEG need not report what is missing."""
    try:
        header = read_header(data)
    except ValueError:
        return False
    if header is None or not header.is_plain or header.orientation != 1:
        return False
    return header.width * header.height <= MAX_PIXELS and data.endswith(b"\xff\xd9")


class _Contents:
    """The files of a data set as they are: what the fetch threads can give without a decoder."""

    def __init__(self, dataset: Samples) -> None:
        self.num_bytes, self.fetch = dataset.num_bytes, dataset.fetch
        self._num = len(dataset)

    def __len__(self) -> int:
        return self._num

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> tuple[Any, int]:
        return fetched, index


class _Read(NamedTuple):
    """A batch that was made aside."""

    batch: Batch | None
    handover: Handover


def _decode_all(
    dataset: Pictures, batches: Sequence[Indices], reading: Reading
) -> Generator[_Read, None, None]:
    depth = reading.depth and _depth(dataset, batches, reading)
    on_cpu = replace(reading, depth=depth, device=torch.device("cpu"), collate=None)
    here = (_Contents(dataset), batches, on_cpu)
    with closing(read_in_threads(*here) if depth else read_here(*here)) as reads:
        for contents in reads:
            if contents is None or contents.num == 0:
                yield _Read(contents, Handover())
                continue
            with devices.borrowed_aside(reading.device) as aside, aside:
                made = _decode_batch(dataset, contents, reading, aside)
                read = _Read(made, aside.hand_over(tensors(made.inputs)))
            del made
            yield read
            del read


def _decode_batch(dataset: Pictures, contents: Batch, reading: Reading, aside: Aside) -> Batch:
    """The samples of `contents`, in order. Raises what the first failing one raises."""
    device, draw = reading.device, reading.draw
    pending = PendingBatch(
        contents.targets.tolist(),
        pin=False,
        skip=reading.skip,
        device=device,
        collate=reading.collate,
    )
    names = [dataset.name(index) for index in pending.indices]
    for row, image in enumerate(decode_many(contents.inputs, names, device, aside)):
        index = pending.indices[row]
        try:
            if isinstance(image, SampleError):  # `decode` reads it again: a cache may be damaged
                pending.put(row, dataset.decode(index, contents.inputs[row], draw))
            else:
                pending.put(row, dataset.finish(index, image, draw))
        except Exception as error:  # raised again by `result_of`, or skipped
            pending.fault(row, error)
        if pending.has_failed:
            break
    made = result_of(pending)
    return made._replace(skipped=contents.skipped + made.skipped)


def _depth(dataset: Samples, batches: Sequence[Indices], reading: Reading) -> int:
    """Batches of contents to have under way: small ones so many that the fetch threads are busy."""
    largest = max(batches, key=len, default=())
    num_bytes = sum(dataset.num_bytes(int(index)) for index in largest)
    wanted = -(-MIN_ROWS_AHEAD // max(1, len(largest)))
    return max(reading.depth, min(wanted, reading.max_bytes // max(1, num_bytes)))
