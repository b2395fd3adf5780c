"""What every datastore of images can do: it is a torch map-style dataset that can be cut, mixed,
checked and looked at. Runs anywhere.

A datastore is made in the notebook, where its files are listed once; it travels to the engines by
pickle, where they are read. Importing this loads no torch; reading an image does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.progress import OnProgress
from gpupool.data.cache.cache import Cached, cached
from gpupool.data.datastores.check import CheckResult, check
from gpupool.data.datastores.labels import check_names
from gpupool.data.datastores.preview import Preview, make_preview
from gpupool.data.datastores.splits import split
from gpupool.data.datastores.table import ItemsT, Packed
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw, apply_transform, read_samples
from gpupool.data.reading.shards import epoch_order

if TYPE_CHECKING:
    import torch

Sample = tuple[Any, Any]


class Datastore(Packed, Generic[ItemsT]):
    """Labelled images; immutable, every method gives a new datastore.

    `fetch` reads what `Items.read` gives, `decode` makes it an image and a label: what is not a
    file with one image each overrides `decode`.
    """

    def __init__(self, items: ItemsT, labels: NDArray[np.int32], names: tuple[str, ...]) -> None:
        self._items = items
        self._labels = labels
        self._names = names
        self._transform: Callable[..., Any] | None = None
        self._normalization: Normalization | None = None

    @property
    def items(self) -> ItemsT:
        """What is read, one for each sample."""
        return self._items

    @property
    def url(self) -> str:
        """Where the images lie, without a password."""
        return " + ".join(dict.fromkeys(source.shown_url for source in self._items.sources))

    @property
    def classes(self) -> list[str]:
        """The names of the labels. Parts of a datastore keep all names of the whole."""
        return list(self._names)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image as an index into `classes`, -100 without; shape (len(self),)."""
        return self._labels.astype(np.int64)

    @property
    def paths(self) -> list[str]:
        """The URL of each image."""
        return list(map(self._items.url, range(len(self))))

    @property
    def transform(self) -> Callable[..., Any] | None:
        """What `with_transform` was given."""
        return self._transform

    @property
    def normalization(self) -> Normalization | None:
        """What `with_normalization` was given, as plain data."""
        return self._normalization

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        """One sample: (uint8 RGB tensor (3, height, width) or what the transform made, label).

        Raises IndexError beyond the end, SampleError naming the image if it cannot be read.
        """
        # `operator.index` takes numpy's integers and refuses floats.
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of a batch: read at the same time, decoded in threads; in order.

        torch's DataLoader calls this for each batch.
        """
        return read_samples(self, indices)

    def num_bytes(self, index: int) -> int:
        """The size of sample `index` in the store, as listed: what `fetch` will hold."""
        return self._items.num_bytes(self._row(index))

    def fetch(self, index: int) -> Any:
        """What the store holds of sample `index`. Waits; may be called from many threads.

        Raises SampleError, CredentialsError or DataError.
        """
        return self._items.read(self._row(index))

    def decode(self, index: int, fetched: Any, draw: Draw | None = None) -> Sample:
        """The sample that `fetch(index)` has read; computes, also in several threads at once.

        `draw` keys the random numbers of the transform. Raises SampleError naming the image if it
        is damaged, and what the transform raises, with a note that names the image.
        """
        from gpupool.data.reading.augmentation import keyed_draws
        from gpupool.data.reading.decode import decode

        made: Any = decode(fetched, self.name(index))
        if self._transform is not None:
            with keyed_draws(draw, index):
                made = apply_transform(self._transform, self.name(index), made)
        return made, int(self._labels[index])

    def name(self, index: int) -> str:
        """The printable URL of an image."""
        return self._items.url(self._row(index))

    def label(self, index: int) -> str:
        """The name of the class of an image; "" without."""
        number = int(self._labels[index])
        return self._names[number] if number >= 0 else ""

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} class{'es' if len(self.classes) != 1 else ''}"
        return f"{type(self).__name__}({len(self):,} images, {classes}, {self.url})"

    def count_each_label(self) -> dict[str, int]:
        """How many images each class has, in the order of `classes`."""
        if not self._names:  # without labels
            return {}
        counts = np.bincount(self._labels[self._labels >= 0], minlength=len(self._names))
        return dict(zip(self._names, counts.tolist(), strict=True))

    def subset(self, indices: ArrayLike) -> Self:
        """The images at `indices` (integers, or one bool per image), in that order."""
        chosen = np.asarray(indices)
        # Of an empty list numpy makes floats.
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iub":
            raise OptionsError("indices must be a flat list of integers, or one bool per image")
        # numpy raises what is wrong with them, and counts negative ones from the end.
        rows = np.arange(len(self))[chosen]
        return self._with(_items=self._items.take(rows), _labels=self._labels[rows])

    def shuffle(self, seed: int = 0) -> Self:
        """The same images in an order that `seed` determines."""
        return self.subset(epoch_order(len(self), seed, 0, shuffle=True))

    def partition(self, num_parts: int, index: int) -> Self:
        """Part `index` of `num_parts`: every num_parts-th image, so that the classes stay mixed."""
        if not 0 <= index < num_parts:
            raise OptionsError(f"index={index} must be in 0..num_parts-1; num_parts={num_parts}")
        return self.subset(np.arange(index, len(self), num_parts))

    def split_each_label(self, *sizes: float, seed: int | None = None) -> tuple[Self, ...]:
        """Split every class alike: a part for each of `sizes`, and one for the rest if any is left.

        `sizes` are fractions of each class, or whole numbers of images per class. `seed=None`
        takes the first images of each class, a number draws them.

            train, validation = ds.split_each_label(0.9, seed=0)
            few, some, rest = ds.split_each_label(10, 100)
        """
        parts = split(self.labels, self.classes, sizes, seed)
        return tuple(self.subset(part) for part in parts)

    def concat(self, *others: Self) -> Self:
        """The images of this and other datastores of the same kind, one after the other.

        Classes of the same name become one. Ours keep their indices, new ones follow, so that a
        network trained on ours keeps its meaning.
        """
        items, labels, names = self._items, [self._labels], list(self._names)
        for other in others:
            # Another class may have items of another kind, which cannot stand in one table.
            if type(other) is not type(self):
                raise OptionsError(
                    f"concat takes datastores of the same kind; {type(self).__name__} and "
                    f"{type(other).__name__} can be put together by torch.utils.data.ConcatDataset"
                )
            # A datastore has one transform: those of the others would be lost.
            if (other._transform, other._normalization) != (self._transform, self._normalization):
                raise OptionsError(
                    "concat: these datastores have another transform or normalization each; "
                    "concat first, then call with_transform and with_normalization"
                )
            names += [name for name in other._names if name not in names]
            items = items.join(other._items)
            labels.append(other._labels_among(names))
        return self._with(_items=items, _labels=np.concatenate(labels), _names=tuple(names))

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same images, with the indices that their classes have among `classes`.

        So a test set counts as a training set does, though it has other folders. In `train`,
        `evaluate`, `predict` and `confusion` this is done for you.

        Raises OptionsError if an image is of another class, or a name comes twice.
        """
        names = check_names(classes)
        counts = self.count_each_label()
        unknown = [name for name, number in counts.items() if number and name not in names]
        if unknown:
            raise OptionsError(
                f"there are images of {', '.join(unknown)}, which classes={list(names)!r} lacks"
            )
        return self._with(_labels=self._labels_among(names), _names=names)

    def with_transform(self, transform: Callable[..., Any] | None) -> Self:
        """The same images, each passed through `transform`, replacing an earlier one; None: as is.

        It gets a uint8 RGB tensor (3, height, width), on an engine, from several threads at once.
        """
        if transform is not None and not callable(transform):
            raise OptionsError(f"transform={transform!r} must be a function of one image, or None")
        return self._with(_transform=transform)

    def with_normalization(
        self, mean: float | Sequence[float] | None, std: float | Sequence[float] | None = None
    ) -> Self:
        """The same images; in training uint8 batches become (image / 255 - mean) / std.

        It is computed once a batch, on the device; `ds[i]` stays uint8. One number each, or one per
        channel, for images in 0..1; `with_normalization(None)` takes it away.

            ds.with_normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        """
        return self._with(_normalization=Normalization.of(mean, std))

    def check(self, on_progress: OnProgress | None = None) -> CheckResult:
        """Read and decode every image once: a table of those that cannot be used, and why.

        `ds.subset(result.good)` leaves them out. Transforms are not applied. `on_progress(done,
        total)` is called now and then; left out, a bar is drawn. Raises CredentialsError or
        DataError if the store itself fails.
        """
        # Without the transform: its errors are the user's code, and say nothing about the files.
        return check(self.with_transform(None), on_progress)

    def preview(self, num_images: int = 16, seed: int | None = None) -> Preview:
        """Small pictures with their labels: a grid in a notebook, lines elsewhere.

        `seed=None` takes the first images of each class in turn, a number draws them.
        """
        return make_preview(self.with_transform(None), num_images, seed)

    def read_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All samples in memory: images (n, 3, height, width) or as transformed, labels (n,).

        Raises OptionsError if there are none, DataError if they differ in size.
        """
        from gpupool.data.reading.collate import batch_of

        if not len(self):
            raise OptionsError(f"{self!r} is empty: there is nothing to read")
        batch = batch_of(read_samples(self, range(len(self))), pin=False)
        return batch.inputs, batch.targets

    def cached(self, limit_gib: float, folder: str | None = None) -> Self:
        """The same samples, kept on the disk of each host after they were read first.

        The ranks of a host share it, and it stays for the next time, below `folder`, best on a
        local disk, or `$XDG_CACHE_HOME/gpupool` (`~/.cache/gpupool`). See `Cached`.

        Raises OptionsError if the store has no versions (ETags), as a local disk, or if the limit
        is too small; DataError if the folder cannot be made here.
        """
        items = self._items.through(partial(cached, limit_gib=limit_gib, folder=folder))
        if len(self) and not items.has_versions:
            raise OptionsError(
                f"{self.url} reports no versions (ETags) of its files, so a cache could not see "
                "that one has changed; read it without cached()"
            )
        for source in items.sources:
            if isinstance(source, Cached):
                # Now, so that a folder that cannot be made is an error of this call, not of a rank.
                source.open()
        return self._with(_items=items)

    def _row(self, index: int) -> int:
        return range(len(self))[index]

    def _labels_among(self, names: Sequence[str]) -> NDArray[np.int32]:
        """The label of each image as an index into `names`, -100 where it has none."""
        place = {name: index for index, name in enumerate(names)}
        places = [place.get(name, NO_CLASS) for name in self._names]
        # Those without a class find the last one.
        return np.array([*places, NO_CLASS], np.int32)[np.maximum(self._labels, -1)]

    def _with(self, **changes: Any) -> Self:
        # Not `type(self)(...)`: `__init__` of a subclass would list the files again.
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__ | changes)
        return changed
