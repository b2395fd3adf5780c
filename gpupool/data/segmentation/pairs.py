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
    for what, (folder, _), own, other in (
        ("images", images, image_of, mask_of),
        ("masks", masks, mask_of, image_of),
    ):
        alone = [folder.name(own[key].path) for key in own.keys() - other.keys()]
        if alone:
            shown = ", ".join(sorted(alone)[:_SHOWN]) + ", ..." * (len(alone) > _SHOWN)
            lacking.append(f"{len(alone):,} of the {what} have no partner: {shown}")
    if lacking:
        told = f"{'; '.join(lacking)}. Remove them, or pass {_FUNCTION}"
        raise DataError(told, "no partner")
    return [mask_of[key] for key in image_of]


def _by_key(folder: Folder, files: Sequence[FileInfo], match: Match) -> dict[str, FileInfo]:
    """The files by what `match` makes of their paths."""
    found: dict[str, FileInfo] = {}
    for file in files:
        # The extension of the last part: dots in the names of folders stay.
        key = match(file.path) if callable(match) else os.path.splitext(file.path)[0]
        other = found.setdefault(key, file)
        if other is not file:
            raise DataError(
                f"{folder.name(other.path)} and {folder.name(file.path)} both match {key!r}; "
                f"remove one, or pass {_FUNCTION}",
                "two partners",
            )
    return found
