"""Which mask belongs to an image. Runs anywhere; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo

_SHOWN = 3
_FUNCTION = "match= a function; it makes of the path of an image or mask what both have in common"

Match = str | Callable[[str], str]
Found = tuple[Folder, Sequence[FileInfo]]


def matched(images: Found, masks: Found, match: Match) -> list[FileInfo]:
    """The mask of each image, in the order of the images.

    `match` is "stem" or a function: what it makes of the paths of an image and of its mask is the
    same. Raises DataError naming files that have no partner, or several.
    """
    if match != "stem" and not callable(match):
        raise OptionsError(f'match={match!r} must be "stem", or pass {_FUNCTION}')
    image_of, mask_of = _by_key(*images, match), _by_key(*masks, match)
    lacking = []
    for what, own, other in (("images", image_of, mask_of), ("masks", mask_of, image_of)):
        urls = [url for key, (url, _) in own.items() if key not in other]
        if urls:
            more = ", ..." * (len(urls) > _SHOWN)
            shown = ", ".join(urls[:_SHOWN]) + more
            lacking.append(f"{len(urls):,} of the {what} have no partner: {shown}")
    if lacking:
        told = f"{'; '.join(lacking)}. Remove them, or pass {_FUNCTION}"
        raise DataError(told, "no partner")
    return [mask_of[key][1] for key in image_of]


def _by_key(
    folder: Folder, files: Sequence[FileInfo], match: Match
) -> dict[str, tuple[str, FileInfo]]:
    """Printable URL and file by what `match` makes of the path."""
    found: dict[str, tuple[str, FileInfo]] = {}
    for file in files:
        # The extension of the last part: dots in the names of folders stay.
        key = match(file.path) if callable(match) else os.path.splitext(file.path)[0]
        url = folder.name(file.path)
        if key in found:
            raise DataError(
                f"{found[key][0]} and {url} both match {key!r}; remove one, or pass {_FUNCTION}",
                "two partners",
            )
        found[key] = url, file
    return found
