"""Members of tar files as items that can be read. Runs anywhere; no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import SampleError
from gpupool.core.terminal import without_controls
from gpupool.data.datastores.compact_arrays import Packed, Texts
from gpupool.data.datastores.manifest import Files
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import Source


@dataclass(frozen=True, eq=False)
class Members(Packed):
    """Row i is the member `names[i]` of `tars`' file `tar_of[i]`: `sizes[i]` bytes at `starts[i]`.

    All arrays have the shape (members,).
    """

    tars: Files
    names: Texts
    tar_of: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the tars lie."""
        return self.tars.sources

    @property
    def has_versions(self) -> bool:
        """Whether their store tells when a tar changes."""
        return self.tars.has_versions

    def __len__(self) -> int:
        return len(self.sizes)

    def url(self, row: int) -> str:
        """The URL of the tar, and the member's name behind it."""
        # A name in a tar may hold anything, and the URL is printed.
        return without_controls(f"{self.tars.url(int(self.tar_of[row]))}/{self.names[row]}")

    def num_bytes(self, row: int) -> int:
        """The size of a member."""
        return int(self.sizes[row])

    def read(self, row: int) -> bytes:
        """The contents of a member, by one range; raises SampleError, and as `Source.read`."""
        size = int(self.sizes[row])
        if size == 0:
            raise SampleError(f"{self.url(row)} is empty (0 bytes)", self.url(row), "empty")
        tar = int(self.tar_of[row])
        data = self.tars.source(tar).read(self.tars.ref(tar), int(self.starts[row]), size)
        # A tar that was cut keeps its beginning: the range then comes back short, without an error.
        if len(data) != size:
            raise SampleError(
                f"{self.url(row)} has changed: the tar ends before it; make the datastore again",
                self.url(row),
                "changed",
            )
        return data

    def take(self, rows: Indices) -> Members:
        """A table of these members, with their tars alone."""
        # Numbered again: a part may touch few of the tars, and only those go along.
        used, tar_of = np.unique(self.tar_of[rows].astype(np.int64), return_inverse=True)
        return Members(
            self.tars.take(used),
            self.names.take(rows),
            tar_of.astype(np.int32),
            self.starts[rows],
            self.sizes[rows],
        )

    def join(self, other: Members) -> Members:
        """The members of both."""
        return Members(
            self.tars.join(other.tars),
            self.names.join(other.names),
            # The tars of the other table come behind ours, hence the shift.
            np.concatenate([self.tar_of, other.tar_of + np.int32(len(self.tars))]),
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.sizes, other.sizes]),
        )

    def through(self, wrap: Callable[[Source], Source]) -> Members:
        """The same members, read through what `wrap` makes of each source."""
        return replace(self, tars=self.tars.through(wrap))
