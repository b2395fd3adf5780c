"""From the bytes of an image file to a tensor, on the CPU. Runs anywhere; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any

import torch
from torchvision.io import ImageReadMode, decode_image

from gpupool.core.errors import DataError

Transform = Callable[[torch.Tensor], Any]


def decode(data: bytes, name: str) -> torch.Tensor:
    """A JPEG, PNG or WebP file as a uint8 tensor of shape (3, height, width), RGB.

    Grey images get three equal channels, transparency is dropped, 16 bits become 8. Raises
    DataError naming `name` if the file is empty, damaged, an animation or no image at all.
    """
    if not data:
        raise DataError(f"{name} is empty (0 bytes)")
    try:
        # bytearray: torch warns about tensors over read-only memory.
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image: torch.Tensor = decode_image(buffer, mode=ImageReadMode.RGB)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{name} is damaged or not an image: {reason}") from None
    if image.ndim != 3:
        raise DataError(f"{name} is an animation; an image datastore takes single images")
    if image.dtype == torch.uint16:
        image = (image.to(torch.int32) >> 8).to(torch.uint8)
    return image


def decode_many(
    files: Sequence[bytes], names: Sequence[str], transform: Transform | None = None
) -> list[Any]:
    """Each file decoded and, where given, transformed; in order.

    Uses `torch.get_num_threads()` threads, as decoding releases the GIL: `transform` must bear
    being called from several threads at once. Raises what the first failing image raised.
    """

    def one_part(part: slice) -> list[Any]:
        images = map(decode, files[part], names[part])
        return [image if transform is None else transform(image) for image in images]

    num_parts = min(torch.get_num_threads(), len(files))
    if num_parts <= 1:
        return one_part(slice(None))
    cuts = [len(files) * i // num_parts for i in range(num_parts + 1)]
    parts = [slice(start, stop) for start, stop in pairwise(cuts)]
    with ThreadPoolExecutor(num_parts, thread_name_prefix="gpupool-decode") as pool:
        return list(chain.from_iterable(pool.map(one_part, parts)))
