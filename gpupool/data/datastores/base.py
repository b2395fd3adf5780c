"""What every datastore of images can do: it is a torch map-style dataset that can be cut, mixed,
checked and looked at. Runs anywhere.

A datastore is made in the notebook, where its files are listed once; it travels to the engines by
pickle, where they are read. Importing this loads no torch; reading an image does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from gpupool.core.errors import OptionsError
from gpupool.data.datastores.labels import among, split
from gpupool.data.datastores.table import Files
from gpupool.data.datastores.views import CheckResult, Preview, check, make_preview
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw, InParts, apply_transform
from gpupool.data.reading.shards import Indices, epoch_order
from gpupool.data.stores.cache import Cache
from gpupool.data.stores.folder import Source

if TYPE_CHECKING:
    import torch

Sample = tuple[Any, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Datastore(InParts):
    """Labelled images; immutable, every method gives a new datastore.

    Args:
        files: the image of each sample; then what else belongs to it, as its mask.
        labels: the label of each as an index into `classes`, -100 where it has none.
        names: the `classes`.
        transform: what `with_transform` was given.
        normalization: what `with_normalization` was given, as plain data.
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
        """What the store holds of sample `index`. Waits; may be called from many threads.

        Raises SampleError, CredentialsError or DataError.
        """
        return self.files[0].read(self._row(index))

    def decode(self, index: int, fetched: Any, draw: Draw | None = None) -> Sample:
        """The sample that `fetch(index)` has read; computes, also in several threads at once.

        `draw` keys the random numbers of the transform. Raises SampleError naming the image if it
        is damaged, and what the transform raises, with a note that names the image.
        """
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

    def read_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All samples in memory: images (n, 3, height, width) or as transformed, labels (n,).

        Raises OptionsError if there are none, DataError if they differ in size.
        """
        from gpupool.data.reading.batches import batch_of

        if not len(self):
            raise OptionsError(f"{self!r} is empty: there is nothing to read")
        batch = batch_of(self.__getitems__(range(len(self))), pin=False)
        return batch.inputs, batch.targets

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

    def _sources(self) -> list[Source]:
        return [source for files in self.files for source in files.sources]

    def _row(self, index: int) -> int:
        return range(len(self))[index]

    def _with(self, **changes: Any) -> Self:
        # Not `type(self)(...)`: `__init__` of a subclass would list the files again.
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__ | changes)
        return changed
