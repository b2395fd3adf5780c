"""How the samples of a datastore go together with the cache of this host; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gpupool.core.errors import OptionsError, SampleError
from gpupool.core.progress import OnProgress, progress_to
from gpupool.data.cache.cache import Cached, CacheState
from gpupool.data.datastores.manifest import ItemsT, Manifest
from gpupool.data.reading.samples import NUM_FETCH_THREADS
from gpupool.data.stores.interface import Part
from gpupool.data.stores.threads import reading_threads

_CHUNK = 512  # samples handed to the threads at once: bounds what an interrupt has to cancel


@dataclass(frozen=True)
class CacheFill:
    """What `Datastore.fill_cache` has done: `num_held` of `num_samples` samples are in the cache.

    `num_unread` could not be read; `unread` has the URLs of their files, of which a tar is one, and
    why: "missing", "changed", "empty". `state` is that of the cache (of the first one, if there are
    several), of which other datastores may take a part.
    """

    num_samples: int
    num_held: int
    state: CacheState
    unread: dict[str, str] = field(default_factory=dict)
    num_unread: int = 0

    def __repr__(self) -> str:
        if self.num_held == self.num_samples:
            return f"All {self.num_samples:,} samples are in the cache: {self.state}."
        text = f"{self.num_held:,} of {self.num_samples:,} samples are in the cache: {self.state}."
        if self.unread:
            url, reason = next(iter(self.unread.items()))
            more = ", ..." if len(self.unread) > 1 else ""
            text += f" {self.num_unread:,} could not be read: {url} ({reason}){more}."
        if self.num_held + self.num_unread < self.num_samples and not self.state.stopped:
            text += " The rest found no room: raise limit_gib, or give another folder."
        return text


def check_cached(manifest: Manifest[ItemsT]) -> None:
    """Make the cache's folder. Raises OptionsError if there is nothing that it could keep."""
    # A hundred, as looking at a million would take seconds: a store has ETags or it has none.
    parts = _some_parts(manifest, 100)
    if parts and not any(part.file.version for part in parts):
        shown = " + ".join(source.shown_url for source in manifest.items.sources)
        raise OptionsError(
            f"{shown} reports no versions (ETags) of its files, so a cache could not see that one "
            "has changed; read it without cached()",
            "no versions",
        )
    for source in manifest.items.sources:
        if isinstance(source, Cached):
            # Now, so that a folder that cannot be made is an error of this call, not of a rank.
            source.state()


def share_held(manifest: Manifest[ItemsT]) -> float:
    """About which share of the samples the cache holds, from a thousand of them; 1.0 of none.

    Raises OptionsError if they are not read through a cache.
    """
    _cache_of(manifest)
    held = [_is_held(part) for part in _some_parts(manifest, 1000)]
    return sum(held) / len(held) if held else 1.0


def fill(manifest: Manifest[ItemsT], on_progress: OnProgress | None = None) -> CacheFill:
    """Read what the cache does not hold; see `Datastore.fill_cache`."""
    cache, total = _cache_of(manifest), len(manifest)
    num_held, num_unread, unread = 0, 0, dict[str, str]()
    with progress_to(on_progress, "Caching", total, "samples") as report:
        for done, outcome in enumerate(_filled(manifest), start=1):
            if isinstance(outcome, SampleError):
                unread[outcome.url] = outcome.reason
                num_unread += 1
            else:
                num_held += outcome
            report(done, total)
    return CacheFill(total, num_held, cache.state(), unread, num_unread)


def _filled(manifest: Manifest[ItemsT]) -> Iterator[bool | SampleError]:
    """For each sample in order whether it is held now, or why it cannot be read.

    Ends early where the cache takes nothing more.
    """

    def read(row: int) -> bool | SampleError:
        parts = manifest.items.parts(row)
        try:
            for part in parts:
                # What is held costs no read, so an interrupted fill can be repeated.
                if not _is_held(part):
                    part.read()
        except SampleError as error:
            return error
        # Asked again after reading, which succeeds also where the cache had no room.
        return all(map(_is_held, parts))

    with reading_threads(NUM_FETCH_THREADS, "gpupool-caching") as pool:
        rows = manifest.rows.tolist()
        for start in range(0, len(rows), _CHUNK):
            counts = dict.fromkeys((True, False, None), 0)  # held, refused, unread
            for outcome in pool.map(read, rows[start : start + _CHUNK]):
                counts[outcome if isinstance(outcome, bool) else None] += 1
                yield outcome
            # A whole chunk found no room: the rest would be read for nothing.
            if not counts[True] and counts[False] > counts[None]:
                return


def _cache_of(manifest: Manifest[ItemsT]) -> Cached:
    """The cache that the samples are read through. Raises OptionsError without one."""
    for source in manifest.items.sources:
        if not isinstance(source, Cached):
            raise OptionsError(
                f"{source.shown_url} is read without a cache; "
                "ds.cached(limit_gib=...) gives it one",
                "no cache",
            )
    source = manifest.items.sources[0]
    assert isinstance(source, Cached)
    return source


def _is_held(part: Part) -> bool:
    return isinstance(part.source, Cached) and part.source.holds(part.file, part.start, part.length)


def _some_parts(manifest: Manifest[ItemsT], number: int) -> list[Part]:
    """What is read of up to `number` samples, evenly spread."""
    # Evenly spread: `fill` goes in order, so after an interrupted one all of the first are held.
    places = np.linspace(0, len(manifest) - 1, min(number, len(manifest))).astype(np.int64)
    rows = manifest.rows[places].tolist()
    return [part for row in rows for part in manifest.items.parts(row)]
