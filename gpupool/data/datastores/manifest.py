"""Which samples a data set has, in which order, with which labels. Runs anywhere; no torch.

Up to millions of them: a few large arrays instead of objects, which are small, quick to pickle,
and which no reference count of a worker process copies page by page.

    items = Files.of(folder, listing.files)      # what can be read
    whole = Manifest(items, np.arange(len(items)), labels, ("cat", "dog"))
    part = whole.take([5, 2])                    # shares the arrays; pickles only what it uses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpupool.core.options.class_names import NO_CLASS
from gpupool.data.datastores.compact_arrays import Packed, Texts, pack, unpack
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import FileInfo, FileRef, Source


class Items(Protocol):
    """What can be read: a table of files, of members of tars, of pairs of files. Immutable."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the items lie."""

    @property
    def has_versions(self) -> bool:
        """Whether a store tells when one of them changes."""

    def __len__(self) -> int: ...

    def url(self, row: int) -> str:
        """The printable URL of an item."""

    def num_bytes(self, row: int) -> int:
        """How many bytes `read` gives, as listed."""

    def read(self, row: int) -> Any:
        """The bytes of an item; waits for its source, in many threads at once."""

    def take(self, rows: Indices) -> Self:
        """A table of these rows."""

    def join(self, other: Self) -> Self:
        """The rows of both; equal sources become one."""

    def through(self, wrap: Callable[[Source], Source]) -> Self:
        """The same items, read through what `wrap` makes of each source."""


ItemsT = TypeVar("ItemsT", bound=Items)


@dataclass(frozen=True, eq=False)
class Files(Packed):
    """Files of one or several sources; row i is the file `ref(i)` of `source(i)`.

    Args:
        sources: where they lie.
        paths: of each file, below its source.
        sizes: in bytes, shape (files,).
        versions: 32 bits of each ETag, 0 where there is none; shape (files,).
        source_of: index into `sources`, shape (files,).
    """

    sources: tuple[Source, ...]
    paths: Texts
    sizes: NDArray[np.int64]
    versions: NDArray[np.uint32]
    source_of: NDArray[np.uint16]

    @classmethod
    def of(cls, source: Source, files: Sequence[FileInfo]) -> Files:
        """The files of a listing, in its order."""
        return cls(
            (source,),
            Texts.of(file.path for file in files),
            np.fromiter((file.size for file in files), np.int64, len(files)),
            np.fromiter((file.version for file in files), np.uint32, len(files)),
            np.zeros(len(files), np.uint16),
        )

    @property
    def has_versions(self) -> bool:
        """Whether their store has ETags."""
        return bool(self.versions.any())

    def __len__(self) -> int:
        return len(self.sizes)

    def source(self, row: int) -> Source:
        """Where a file lies."""
        return self.sources[int(self.source_of[row])]

    def ref(self, row: int) -> FileRef:
        """What its source needs to read it."""
        return FileRef(self.paths[row], int(self.sizes[row]), int(self.versions[row]))

    def url(self, row: int) -> str:
        """The printable URL of a file."""
        return self.source(row).name(self.paths[row])

    def num_bytes(self, row: int) -> int:
        """The size of a file, as listed."""
        return int(self.sizes[row])

    def read(self, row: int) -> bytes:
        """The contents of a file; raises what `Source.read` raises."""
        return self.source(row).read(self.ref(row))

    def take(self, rows: Indices) -> Files:
        """A table of these files."""
        return Files(
            self.sources,
            self.paths.take(rows),
            self.sizes[rows],
            self.versions[rows],
            self.source_of[rows],
        )

    def join(self, other: Files) -> Files:
        """The files of both; equal sources become one."""
        sources, place = join_sources(self.sources, other.sources)
        return Files(
            sources,
            self.paths.join(other.paths),
            np.concatenate([self.sizes, other.sizes]),
            np.concatenate([self.versions, other.versions]),
            np.concatenate([self.source_of, place[other.source_of]]),
        )

    def through(self, wrap: Callable[[Source], Source]) -> Files:
        """The same files, read through what `wrap` makes of each source."""
        return replace(self, sources=tuple(map(wrap, self.sources)))


def join_sources(
    ours: tuple[Source, ...], others: tuple[Source, ...]
) -> tuple[tuple[Source, ...], NDArray[np.uint16]]:
    """Both together, equal ones once, and the place of each of `others` among them."""
    sources = list(ours)
    sources += [source for source in others if source not in ours]
    return tuple(sources), np.array([sources.index(source) for source in others], np.uint16)


@dataclass(frozen=True, eq=False)
class Manifest(Generic[ItemsT]):
    """Sample i is item `rows[i]` with the label `classes[labels[rows[i]]]`.

    A rank gets this instead of listing. Pickled, it holds the items that `rows` names, and no
    others, compressed: a million keys of 30 bytes with sizes and versions are about 10 MB, of
    which the keys take 3, versions 4 (they are random) and sizes 2; an order of its own adds 3.

    Args:
        items: what can be read.
        rows: shape (samples,), indices into `items`.
        labels: of each item (not sample), an index into `classes`.
        classes: the names of the labels.
    """

    items: ItemsT
    rows: Indices
    labels: NDArray[np.int32]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sample_labels(self) -> NDArray[np.int64]:
        """The label of each sample, shape (samples,)."""
        return self.labels[self.rows].astype(np.int64)

    def take(self, chosen: NDArray[Any]) -> Self:
        """The samples at `chosen` (integers, or one bool per sample), in that order."""
        # The items stay whole and shared; only a pickle leaves the unused ones out (`compact`).
        return replace(self, rows=self.rows[chosen])

    def compact(self) -> Self:
        """The same samples, without the items that none of them is."""
        # A row that occurs several times, is stored once.
        used, rows = np.unique(self.rows, return_inverse=True)
        if len(used) == len(self.items):
            return self
        return replace(self, items=self.items.take(used), rows=rows, labels=self.labels[used])

    def join(self, other: Manifest[ItemsT]) -> Self:
        """The samples of both, one after the other; classes of the same name become one.

        Ours keep their indices, those that only `other` has follow.
        """
        # Parts of one datastore: there is nothing to copy.
        if self.items is other.items and self.labels is other.labels:
            return replace(self, rows=np.concatenate([self.rows, other.rows]))
        ours, others = self.compact(), other.compact()
        classes = [*self.classes, *(name for name in other.classes if name not in self.classes)]
        place = {name: index for index, name in enumerate(classes)}
        # The same name may have another index in the other one.
        relabel = np.array([place[name] for name in other.classes], np.int32)
        return replace(
            self,
            items=ours.items.join(others.items),
            rows=np.concatenate([ours.rows, others.rows + len(ours.items)]),
            labels=np.concatenate([ours.labels, relabel[others.labels]]),
            classes=tuple(classes),
        )

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same samples, counted by these names, which hold that of every sample."""
        place = {name: index for index, name in enumerate(classes)}
        # Items that are no samples here may be of any class.
        relabel = np.array([place.get(name, NO_CLASS) for name in self.classes], np.int32)
        return replace(self, labels=relabel[self.labels], classes=tuple(classes))

    def through(self, wrap: Callable[[Source], Source]) -> Self:
        """The same samples, read through what `wrap` makes of each source: a cache."""
        return replace(self, items=self.items.through(wrap))

    def __getstate__(self) -> dict[str, Any]:
        # A part of a large datastore must not send all of it to every rank.
        small = self.compact()
        return {
            "items": small.items,
            "rows": pack(small.rows),
            "labels": pack(small.labels),
            "classes": small.classes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: unpack(state[name]) for name in ("rows", "labels")}
        self.__dict__.update(state | arrays)
