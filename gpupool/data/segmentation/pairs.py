"""Pairs of files: an image and its mask. Runs anywhere; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.datastores.table import Files
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import FileInfo, Source

_SHOWN = 3

Match = str | Callable[[str], str]


@dataclass(frozen=True, eq=False)
class FilePairs:
    """`Items` of a datastore: item i is file i of `images` with file i of `masks`."""

    images: Files
    masks: Files

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where images and masks lie."""
        return self.images.sources + self.masks.sources

    @property
    def has_versions(self) -> bool:
        """Whether the store of images or of masks tells when a file changes."""
        return self.images.has_versions or self.masks.has_versions

    def __len__(self) -> int:
        return len(self.images)

    def url(self, row: int) -> str:
        """The printable URL of the image."""
        return self.images.url(row)

    def num_bytes(self, row: int) -> int:
        """The size of both files, as listed."""
        return self.images.num_bytes(row) + self.masks.num_bytes(row)

    def read(self, row: int) -> tuple[bytes, bytes]:
        """The contents of both files; raises what `Source.read` raises."""
        return self.images.read(row), self.masks.read(row)

    def take(self, rows: Indices) -> FilePairs:
        """These pairs."""
        return FilePairs(self.images.take(rows), self.masks.take(rows))

    def join(self, other: FilePairs) -> FilePairs:
        """The pairs of both; equal sources become one."""
        return FilePairs(self.images.join(other.images), self.masks.join(other.masks))

    def through(self, wrap: Callable[[Source], Source]) -> FilePairs:
        """The same pairs, read through what `wrap` makes of each source."""
        return FilePairs(self.images.through(wrap), self.masks.through(wrap))


def matched(
    images: Sequence[FileInfo],
    masks: Sequence[FileInfo],
    match: Match,
    image_name: Callable[[str], str],
    mask_name: Callable[[str], str],
) -> tuple[list[FileInfo], list[FileInfo]]:
    """Images and masks in pairs, in the order of the images.

    `match` is "stem" or a function: what it makes of the paths of an image and of its mask is the
    same. `image_name` and `mask_name` give the printable URL of a path. Raises DataError naming
    files that have no partner, or several.
    """
    key = _stem if match == "stem" else match
    # Another word than "stem".
    if isinstance(key, str):
        raise OptionsError(
            f'match={match!r} must be "stem" (the path without its extension) or a function from '
            "the path of an image or mask to what both have in common"
        )
    image_of = _by_key(images, key, image_name)
    mask_of = _by_key(masks, key, mask_name)
    alone = [image_name(file.path) for own, file in image_of.items() if own not in mask_of]
    alone_too = [mask_name(file.path) for own, file in mask_of.items() if own not in image_of]
    lacking = [*_lack(alone, "image", "mask"), *_lack(alone_too, "mask", "image")]
    if lacking:
        raise DataError(
            f"{'; '.join(lacking)}. Remove them, or pass match= a function from the path of an "
            "image or mask to what both have in common",
            "no partner",
        )
    return list(image_of.values()), [mask_of[own] for own in image_of]


def _stem(path: str) -> str:
    # Of the last part: dots in the names of folders stay.
    return os.path.splitext(path)[0]


def _by_key(
    files: Sequence[FileInfo], key: Callable[[str], str], name: Callable[[str], str]
) -> Mapping[str, FileInfo]:
    found: dict[str, FileInfo] = {}
    for file in files:
        own = key(file.path)
        other = found.setdefault(own, file)
        if other is not file:
            raise DataError(
                f"{name(other.path)} and {name(file.path)} both match {own!r}; remove one, or "
                "pass match= a function that distinguishes them",
                "two partners",
            )
    return found


def _lack(urls: Sequence[str], what: str, partner: str) -> Iterator[str]:
    if urls:
        have = f"{len(urls):,} {what}{'s have' if len(urls) > 1 else ' has'} no {partner}"
        more = ", ..." if len(urls) > _SHOWN else ""
        yield f"{have}: {', '.join(urls[:_SHOWN])}{more}"
