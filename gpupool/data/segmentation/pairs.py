"""Pairs of files: an image and its mask. Runs anywhere; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.datastores.table import Files
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import FileInfo, Source

_SHOWN = 3
_FUNCTION = "it makes of the path of an image or mask what both have in common"

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
    if match != "stem" and not callable(match):
        raise OptionsError(f'match={match!r} must be "stem" or a function; {_FUNCTION}')
    # The extension of the last part: dots in the names of folders stay.
    key = match if callable(match) else lambda path: os.path.splitext(path)[0]
    image_of, mask_of = _by_key(images, key, image_name), _by_key(masks, key, mask_name)
    alone = [image_name(file.path) for own, file in image_of.items() if own not in mask_of]
    alone_too = [mask_name(file.path) for own, file in mask_of.items() if own not in image_of]
    lacking = [
        f"{len(urls):,} of the {what} have no partner: {', '.join(urls[:_SHOWN])}"
        + ", ..." * (len(urls) > _SHOWN)
        for what, urls in (("images", alone), ("masks", alone_too))
        if urls
    ]
    if lacking:
        told = f"{'; '.join(lacking)}. Remove them, or pass match= a function; {_FUNCTION}"
        raise DataError(told, "no partner")
    return list(image_of.values()), [mask_of[own] for own in image_of]


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
                f"pass match= a function that distinguishes them; {_FUNCTION}",
                "two partners",
            )
    return found
