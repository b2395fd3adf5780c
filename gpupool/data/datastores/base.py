"""What every datastore of images can do: it is a torch map-style dataset that can be cut, mixed,
checked and looked at. Made in the notebook, where its files are listed once; it travels to the
engines by pickle, where they are read. Importing this loads no torch; reading an image does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpupool.core.errors import OptionsError
from gpupool.data.datastores.labels import Labels, among, labelled, split
from gpupool.data.datastores.views import CheckResult, Preview, check, make_preview
from gpupool.data.reading.samples import Draw, InParts, Normalization, apply_transform
from gpupool.data.reading.shards import Indices, epoch_order
from gpupool.data.stores.cache import Cache
from gpupool.data.stores.folder import FileRef, Source

Sample = tuple[Any, Any]
Row = tuple[int, int, int, int, str]  # as in `Files.rows`
_COLUMNS = [("source", "u4"), ("version", "u4"), ("size", "i8"), ("start", "i8")]


@dataclass(frozen=True, eq=False)
class Files:
    """Files, or parts of files, of one or several sources; immutable.

    `rows` has of each the index of its source, 32 bits of its ETag (0 where there is none), its
    size in bytes, where in a file of its source a part begins (0 for whole files), and its path
    below its source, as bytes. Columns of numpy, as they may be millions: ranks of a host share
    them, and no reference count of a worker process copies them page by page.
    """

    sources: tuple[Source, ...]
    rows: NDArray[Any]
    cache: Cache | None = None

    @classmethod
    def of(cls, sources: Sequence[Source], rows: Iterable[Row]) -> Files:
        # As `os.fsencode` does: names of files on Linux are bytes, not always UTF-8.
        encoded = [(*row[:-1], row[-1].encode(errors="surrogateescape")) for row in rows]
        width = max((len(row[-1]) for row in encoded), default=1)
        return cls(tuple(sources), np.array(encoded, [*_COLUMNS, ("path", f"S{width}")]))

    def url(self, row: int) -> str:
        return self.sources[int(self.rows["source"][row])].name(self.path(row))

    def read(self, row: int) -> bytes:
        number, version, size, start, _ = self.rows[row].tolist()
        source, file = self.sources[number], FileRef(self.path(row), size, version)
        read = source.read if self.cache is None else partial(self.cache.read, source)
        return read(file, start, size if start else None)

    def take(self, rows: Indices) -> Files:
        return replace(self, rows=self.rows[rows])

    def path(self, row: int) -> str:
        path: bytes = self.rows["path"][row]
        return path.decode(errors="surrogateescape")


@dataclass(frozen=True, eq=False, repr=False)
class Datastore(InParts):
    """Labelled images; immutable, every method gives a new datastore.

    `files` are the images, then what else belongs to each, as its mask; `labels` indices into
    `names`, -100 where there is none.
    """

    files: tuple[Files, ...]
    labels: Indices
    names: tuple[str, ...]
    transform: Callable[..., Any] | None = None
    normalization: Normalization | None = None

    @property
    def url(self) -> str:
        """Where the files lie, without a password."""
        return " + ".join(dict.fromkeys(source.shown_url for source in self._sources()))

    @property
    def classes(self) -> list[str]:
        """The names of the labels. Parts of a datastore keep all names of the whole."""
        return list(self.names)

    @property
    def paths(self) -> list[str]:
        """The URL of each image."""
        return list(map(self.files[0].url, range(len(self))))

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, index: int) -> Any:
        return self.files[0].read(self._row(index))

    def decode(self, index: int, fetched: Any, draw: Draw | None = None) -> Sample:
        from gpupool.data.reading.augmentation import keyed_draws
        from gpupool.data.reading.decode import decode

        made: Any = decode(fetched, self.name(index))
        if self.transform is not None:
            with keyed_draws(draw, index):
                made = apply_transform(self.transform, self.name(index), made)
        return made, int(self.labels[index])

    def name(self, index: int) -> str:
        """The printable URL of an image."""
        return self.files[0].url(self._row(index))

    def label(self, index: int) -> str:
        """The name of the class of an image; "" without."""
        number = int(self.labels[index])
        return self.names[number] if number >= 0 else ""

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} class{'es' if len(self.classes) != 1 else ''}"
        return f"{type(self).__name__}({len(self):,} images, {classes}, {self.url})"

    def count_each_label(self) -> dict[str, int]:
        """How many images each class has, in the order of `classes`."""
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def subset(self, indices: ArrayLike) -> Self:
        """The images at `indices` (integers, or one bool per image), in that order."""
        # numpy raises what is wrong with them, and counts negative ones from the end.
        rows = np.arange(len(self))[np.asarray(indices) if np.size(indices) else []]
        if rows.ndim != 1:
            raise OptionsError("indices must be a flat list of integers, or one bool per image")
        files = tuple(files.take(rows) for files in self.files)
        return self._with(files=files, labels=self.labels[rows])

    def shuffle(self, seed: int = 0) -> Self:
        """The same images in an order that `seed` determines."""
        return self.subset(epoch_order(len(self), seed, 0, shuffle=True))

    def partition(self, n: int, i: int) -> Self:
        """Part `i` (0 to n - 1) of `n`: every n-th image, from the i-th on."""
        if not 0 <= i < n:
            raise OptionsError(f"partition({n}, {i}): the parts are 0 to {n - 1}")
        return self.subset(range(i, len(self), n))

    def split_each_label(self, *sizes: float, seed: int | None = None) -> tuple[Self, ...]:
        """Split every class alike: a part for each of `sizes`, and one for the rest if any is left.

        `sizes` are fractions of each class, or whole numbers of images per class. `seed=None`
        takes the first images of each class, a number draws them.

            train, validation = ds.split_each_label(0.9, seed=0)
            few, some, rest = ds.split_each_label(10, 100)
        """
        return tuple(map(self.subset, split(self.labels, self.names, sizes, seed)))

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same images, with the indices that their classes have among `classes`.

        So a test set counts as a training set does, though it has other folders. In `train`,
        `evaluate`, `predict` and `confusion` this is done for you.

        Raises OptionsError if an image is of another class, or a name comes twice.
        """
        return self._with(labels=among(classes, self.labels, self.names), names=tuple(classes))

    def with_transform(self, transform: Callable[..., Any] | None) -> Self:
        """The same images, each passed through `transform`, replacing an earlier one; None: as is.

        It gets a uint8 RGB tensor (3, height, width), on an engine, from several threads at once.
        """
        if transform is not None and not callable(transform):
            raise OptionsError(f"transform={transform!r} must be a function of one image, or None")
        return self._with(transform=transform)

    def with_normalization(
        self, mean: float | Sequence[float] | None, std: float | Sequence[float] | None = None
    ) -> Self:
        """The same images; in training uint8 batches become (image / 255 - mean) / std.

        It is computed once a batch, on the device; `ds[i]` stays uint8. One number each, or one per
        channel, for images in 0..1; `with_normalization(None)` takes it away.

            ds.with_normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        """
        return self._with(normalization=Normalization.of(mean, std))

    def check(self) -> CheckResult:
        """Read and decode every image once: a table of those that cannot be used, and why.

        `ds.subset(result.good)` leaves them out. Transforms are not applied. Raises
        CredentialsError or DataError if the store itself fails.
        """
        # Without the transform: its errors are the user's code, and say nothing about the files.
        return check(self.with_transform(None))

    def preview(self, num_images: int = 16) -> Preview:
        """Small pictures with their labels: a grid in a notebook, lines elsewhere.

        The first images of each class in turn; `ds.shuffle(seed)` has others first.
        """
        return make_preview(self.with_transform(None), num_images)

    def cached(self, limit_gib: float, folder: str | None = None) -> Self:
        """The same samples, kept on the disk of each host after they were read first.

        The ranks of a host share it, and it stays for the next time, below `folder`, best on a
        local disk, or `$XDG_CACHE_HOME/gpupool` (`~/.cache/gpupool`). See `Cache`.

        Raises OptionsError if the store has no versions (ETags), as a local disk, or if the limit
        is too small; DataError if the folder cannot be made here.
        """
        if len(self) and not any(files.rows["version"].any() for files in self.files):
            raise OptionsError(
                f"{self.url} reports no versions (ETags) of its files, so a cache could not see "
                "that one has changed; read it without cached()"
            )
        cache = Cache(limit_gib, folder)
        for source in self._sources():
            # Now, so that a folder that cannot be made is an error of this call, not of a rank.
            cache.open(source)
        return self._with(files=tuple(replace(files, cache=cache) for files in self.files))

    def _fill(self, files: Files, labels: Labels, known: Sequence[str | None] = ()) -> None:
        paths = list(map(files.path, range(len(files.rows))))
        kept, indices, names = labelled(paths, files.url, labels, known)
        Datastore.__init__(self, (files.take(kept),), indices, names)

    def _sources(self) -> list[Source]:
        return [source for files in self.files for source in files.sources]

    def _row(self, index: int) -> int:
        return range(len(self))[index]

    def _with(self, **changes: Any) -> Self:
        # Not `type(self)(...)`: `__init__` of a subclass would list the files again.
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__ | changes)
        return changed
