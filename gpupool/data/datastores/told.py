"""What a datastore says when it is made: what it leaves out, and what it may have understood
otherwise than it was meant. Runs anywhere; no torch.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from os.path import splitext

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
# Pictures by their names, which may be of formats that no library here decodes.
_OTHER_EXTENSIONS = {
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl"),
    *(".arw", ".cr2", ".dng", ".nef", ".pgm", ".pnm", ".ppm", ".tif", ".tiff"),
}


def warn(message: str) -> None:
    """A warning at the line of the user's that makes the datastore."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gpupool."):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def warn_of_pictures(paths: Iterable[str], extensions: Sequence[str]) -> None:
    """Say how many pictures `extensions` leave out; who chooses them knows what is left out."""
    if tuple(extensions) != IMAGE_EXTENSIONS:
        return
    found = Counter(splitext(path)[1].lower() for path in paths)
    if others := {ending: found[ending] for ending in sorted(_OTHER_EXTENSIONS & set(found))}:
        shown = ", ".join(f"{ending} {number:,}" for ending, number in others.items())
        warn(
            f"files are left out: {sum(others.values()):,} ({shown}); "
            'take them too with extensions=(".jpg", ...), or convert them'
        )
