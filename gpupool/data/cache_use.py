"""How the samples of a datastore go together with the cache of this host; no torch."""

from __future__ import annotations

import numpy as np

from gpupool.core.errors import OptionsError
from gpupool.data.cache import Cached
from gpupool.data.manifest import ItemsT, Manifest, Part


def check_cached(manifest: Manifest[ItemsT]) -> None:
    """Make the cache's folder. Raises OptionsError if there is nothing that it could keep."""
    parts = _some_parts(manifest, 100)
    if parts and not any(part.file.version for part in parts):
        shown = " + ".join(source.shown_url for source in manifest.items.sources)
        raise OptionsError(
            f"{shown} tells no versions (ETags) of its files, so a cache could not see that one "
            "has changed; read it without cached()"
        )
    for source in manifest.items.sources:
        if isinstance(source, Cached):
            source.state()


def share_held(manifest: Manifest[ItemsT]) -> float:
    """About which share of the samples the cache holds, from a thousand of them; 1.0 of none.

    Raises OptionsError if they are not read through a cache.
    """
    held = []
    for source, file, start, length in _some_parts(manifest, 1000):
        if not isinstance(source, Cached):
            raise OptionsError(
                f"{source.shown_url} is read without a cache; ds.cached(limit_gib=...) gives it one"
            )
        held.append(source.holds(file, start, length))
    return sum(held) / len(held) if held else 1.0


def _some_parts(manifest: Manifest[ItemsT], number: int) -> list[Part]:
    """What is read of up to `number` samples, evenly spread."""
    places = np.linspace(0, len(manifest) - 1, min(number, len(manifest))).astype(np.int64)
    rows = manifest.rows[places].tolist()
    return [part for row in rows for part in manifest.items.parts(row)]
