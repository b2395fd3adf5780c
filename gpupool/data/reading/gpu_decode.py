"""JPEGs decoded by the GPU (nvJPEG), a batch at a time: `ds.decoded_on("cuda")`. Runs on engines.

    fetch threads ──> batches of contents ──> one thread: decode_jpeg(list), transform ──> batches

What nvJPEG is not given (PNGs, CMYK, pictures that lie on their side, files that do not end as a
JPEG does) is decoded on the CPU and copied. With "auto" the first batches of a reading are decoded
by the CPU and by the GPU in turn, and the faster goes on. All that is made on the GPU goes through
its current stream, as the steps of a training do: these need not wait for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.reading.collate import Batch, PendingBatch
from gpupool.data.reading.cpu_loader import read_ahead, read_on_cpu
from gpupool.data.reading.decode import decode
from gpupool.data.reading.image_headers import MAX_PIXELS, read_header
from gpupool.data.reading.pipeline import (
    MIN_ROWS_AHEAD,
    THREAD_NAME,
    Reading,
    result_of,
    work_alone,
)
from gpupool.data.reading.samples import Draw, Samples
from gpupool.data.reading.shards import Indices

NUM_TRIED = 6  # batches, half of them each way
Place = Literal["cpu", "cuda"]
Batches = Generator[Batch | None, None, None]


class Pictures(Samples, Protocol):
    """Samples whose `fetch` gives an image file, and whose `decode` is `decode`, then `finish`."""

    def name(self, index: int) -> str:
        """The printable URL of an image."""

    def finish(self, index: int, image: torch.Tensor, draw: Draw | None) -> tuple[Any, Any]:
        """The sample of a decoded image: transformed on the device where it lies, and its label."""


def allowed_place(asked: str, device: torch.device) -> str:
    """`asked` ("cuda", "auto"), or "cpu" for "auto" where the device decodes nothing.

    Raises OptionsError for "cuda" there.
    """
    why_not = "this rank has no GPU" if device.type != "cuda" else why_not_on(device)
    if why_not and asked == "cuda":
        raise OptionsError(f'decoded_on("cuda"): {why_not}; use decoded_on("auto") or "cpu"')
    return "cpu" if why_not else asked


def why_not_on(device: torch.device) -> str:
    """Why `device` decodes not even a plain JPEG, so that no file is blamed for it; "" if it does.

    The first call makes the decoder, which takes a moment.
    """
    try:
        decode_jpeg([encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))], device=device)
    except RuntimeError as error:
        return f"JPEGs cannot be decoded on {device} ({str(error).splitlines()[0]})"
    return ""


def faster(cpu_s: Sequence[float], cuda_s: Sequence[float]) -> Place:
    """Which way to go on, by the seconds an image took in each batch; the CPU if in doubt.

    The first of each does not count: it also starts threads and takes memory.

    >>> faster([9.0, 0.2, 0.3, 0.2], [5.0, 0.1, 0.1, 4.0]), faster([0.2], [0.1])
    ('cuda', 'cpu')
    """
    if len(cpu_s) < 2 or len(cuda_s) < 2:
        return "cpu"
    return "cuda" if statistics.median(cuda_s[1:]) < statistics.median(cpu_s[1:]) else "cpu"


def read_on_gpu(
    dataset: Pictures,
    batches: Sequence[Indices],
    reading: Reading,
    place: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Batches:
    """As `load_batches`, with inputs that lie on `reading.device`: "cuda" all, "auto" the faster.

    The pictures of "auto" that the CPU decodes lie in its memory, as ever. When it goes on with the
    CPU, the store is waited for once, as at the start.
    """
    if place == "cuda":
        yield from _read(_Decoder(dataset, reading, ["cuda"], clock), batches)
        return
    trial = _Decoder(dataset, reading, ["cpu", "cuda"], clock)
    yield from _read(trial, batches[:NUM_TRIED])
    rest = batches[NUM_TRIED:]
    if faster(trial.image_s["cpu"], trial.image_s["cuda"]) == "cuda":
        yield from _read(_Decoder(dataset, reading, ["cuda"], clock), rest)
    else:
        yield from read_on_cpu(dataset, rest, reading)


def decode_many(
    contents: Sequence[bytes], names: Sequence[str], device: torch.device
) -> list[torch.Tensor | SampleError]:
    """For each image file its picture on `device`, as `decode` makes it, or what is wrong with it.

    Plain JPEGs in one call. If that fails, the CPU decodes all: the device does not tell which of
    them is damaged. Raises what else the device raises, such as torch.OutOfMemoryError.
    """
    plain = [place for place, data in enumerate(contents) if _is_for_device(data)]
    found: dict[int, torch.Tensor | SampleError] = {}
    # bytearray: torch warns about tensors over read-only memory.
    buffers = [torch.frombuffer(bytearray(contents[at]), dtype=torch.uint8) for at in plain]
    try:
        made = decode_jpeg(buffers, ImageReadMode.RGB, device) if buffers else []
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


def _is_for_device(data: bytes) -> bool:
    """A plain, upright JPEG that is not cut off: nvJPEG need not tell what is missing."""
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


class _Decoder:
    """Makes batches of batches of contents, in the `places` in turn; used by one thread.

    `image_s` has the seconds an image took, for each batch made in a place.
    """

    def __init__(
        self,
        dataset: Pictures,
        reading: Reading,
        places: Sequence[Place],
        clock: Callable[[], float],
    ) -> None:
        self.dataset, self.reading, self.places, self._clock = dataset, reading, places, clock
        self.image_s: dict[Place, list[float]] = {"cpu": [], "cuda": []}
        self._num_cores = torch.get_num_threads()
        self.threads = ThreadPoolExecutor(  # they start when they are used
            self._num_cores, THREAD_NAME, work_alone, (reading.device,)
        )

    def batch(self, contents: Batch, place: Place) -> Batch:
        """The samples of `contents`, in order. Raises what the first failing one raises."""
        on_cpu, is_trial = place == "cpu", len(self.places) > 1
        device = torch.device("cpu") if on_cpu else self.reading.device
        pin, skip = on_cpu and self.reading.pin, self.reading.skip
        pending = PendingBatch(contents.targets.tolist(), pin=pin, skip=skip, device=device)
        start = self._clock()
        (self._by_threads if on_cpu else self._at_once)(pending, contents.inputs)
        made = result_of(pending)
        if is_trial and device.type == "cuda":  # when a step could use it
            torch.cuda.current_stream(device).synchronize()
        self.image_s[place].append((self._clock() - start) / contents.num)
        return made._replace(skipped=contents.skipped + made.skipped)

    def _at_once(self, pending: PendingBatch, contents: Sequence[bytes]) -> None:
        names = [self.dataset.name(index) for index in pending.indices]
        for row, image in enumerate(decode_many(contents, names, self.reading.device)):
            try:
                index, draw = pending.indices[row], self.reading.draw
                if isinstance(image, SampleError):  # which reads it again
                    pending.put(row, self.dataset.decode(index, contents[row], draw))
                else:
                    pending.put(row, self.dataset.finish(index, image, draw))
            except Exception as error:  # raised again by `result_of`, or skipped
                pending.fault(row, error)
            if pending.has_failed:
                return

    def _by_threads(self, pending: PendingBatch, contents: Sequence[bytes]) -> None:
        """As the loader does on the CPU, with as many threads."""

        def decode_one(row: int) -> None:
            try:
                index = pending.indices[row]
                pending.put(row, self.dataset.decode(index, contents[row], self.reading.draw))
            except Exception as error:  # as above
                pending.fault(row, error)

        list(self.threads.map(decode_one, range(len(contents))))
        torch.set_num_threads(self._num_cores)  # the threads' own setting became the default


def _read(decoder: _Decoder, batches: Sequence[Indices]) -> Batches:
    """Batches read and decoded ahead; with depth 0 in the caller's thread."""
    made = _made(decoder, batches)
    depth = decoder.reading.depth
    return made if depth == 0 else read_ahead(made, len(batches), decoder.reading)


def _made(decoder: _Decoder, batches: Sequence[Indices]) -> Batches:
    reading = decoder.reading
    depth = reading.depth and _depth(decoder.dataset, batches, reading)
    cpu = replace(reading, depth=depth, device=torch.device("cpu"))
    turn = 0
    reads = read_on_cpu(_Contents(decoder.dataset), batches, cpu)
    with decoder.threads, closing(reads):
        for contents in reads:
            if contents is None or contents.num == 0:
                yield contents
                continue
            yield decoder.batch(contents, decoder.places[turn % len(decoder.places)])
            turn += 1


def _depth(dataset: Samples, batches: Sequence[Indices], reading: Reading) -> int:
    """Batches of contents to have under way: small ones so many that the fetch threads are busy."""
    largest = max(batches, key=len, default=())
    num_bytes = sum(dataset.num_bytes(int(index)) for index in largest)
    wanted = -(-MIN_ROWS_AHEAD // max(1, len(largest)))
    return max(reading.depth, min(wanted, reading.max_bytes // max(1, num_bytes)))
