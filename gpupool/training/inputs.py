"""What a user gives in the place of a data set: arrays, pictures, URLs. Runs on the client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError
from gpupool.pool.variables.composite import value_of

if TYPE_CHECKING:
    from torch import Tensor, nn

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def with_targets(given: Any, model: nn.Module) -> Any:
    """A TensorDataset of a pair (inputs, targets) of arrays or tensors; anything else as it is, and
    of a Constant what the ranks have.

    Raises:
        TrainingError: both have another number of samples.
    """
    given = value_of(given)
    if not (isinstance(given, tuple) and len(given) == 2 and all(map(_is_array, given))):
        return given
    from torch.utils.data import TensorDataset

    inputs, targets = as_tensor(given[0], model), as_tensor(given[1], model, is_target=True)
    if len(inputs) != len(targets):
        raise TrainingError(
            f"there are {len(inputs):,} inputs and {len(targets):,} targets: give as many of both."
        )
    return TensorDataset(inputs, targets)


def of_inputs(given: Any, model: nn.Module) -> Any:
    """What ranks make a data set of: tensors, lists of pictures or of their URLs, data sets.

    A URL of a folder becomes a datastore, which lists it here, once; an iterator is walked through.
    """
    given = value_of(given)
    if isinstance(given, (str, os.PathLike)):
        url = os.fspath(given)
        if url.lower().endswith(PICTURES):
            return [absolute(url)]
        import gpupool

        return gpupool.ImageDatastore(url, labels=None)
    if _is_picture(given):
        return [given]
    given = list(given) if hasattr(given, "__next__") else with_targets(given, model)
    if isinstance(given, (list, tuple)) and given:
        if all(isinstance(one, (str, os.PathLike)) for one in given):
            return [absolute(os.fspath(one)) for one in given]
        if isinstance(given[0], (int, float, list)):
            import numpy as np

            given = np.asarray(given)
    return as_tensor(given, model) if _is_array(given) else given


def picture_transform(validation: Any) -> Any:
    """What a single picture goes through: the transform of a datastore of images that was
    validated on, or of what it is a part of; None without."""
    while hasattr(validation, "dataset") and hasattr(validation, "indices"):
        validation = validation.dataset
    # Masks go through a transform together with their images.
    is_ours = hasattr(validation, "with_normalization") and not hasattr(validation, "mask_paths")
    return validation.transform if is_ours else None


def as_tensor(given: Any, model: nn.Module, *, is_target: bool = False) -> Tensor:
    """A tensor as it is; an array in the precision of the network, whole targets as int64.

    uint8 arrays (..., height, width, channels) are pictures, as of Pillow: channels come first
    then. A single picture becomes one of a batch.
    """
    import numpy as np
    import torch

    if isinstance(given, torch.Tensor):
        found, is_picture = given, given.dtype == torch.uint8 and given.shape[:-2] in ((1,), (3,))
    else:
        array = np.asarray(given)
        if array.dtype.kind not in "biuf":
            raise TrainingError(
                f"an array of {array.dtype} is none of numbers; give numbers, or a data set."
            )
        is_picture = array.dtype == np.uint8 and array.ndim in (3, 4) and array.shape[-1] in (1, 3)
        if is_picture and not is_target:
            array = np.moveaxis(array, -1, -3)
        found = torch.from_numpy(np.ascontiguousarray(array))
        if found.is_floating_point():
            found = found.to(next((p.dtype for p in model.parameters()), torch.float32))
        elif is_target and found.dtype != torch.bool:
            found = found.long()
    return found[None] if is_picture and not is_target and found.ndim == 3 else found


def _is_array(given: Any) -> bool:
    # numpy's, torch's, and what can become one of numpy's.
    return hasattr(given, "shape") and hasattr(given, "__array__") and not _is_picture(given)


def _is_picture(given: Any) -> bool:
    """Whether it is an image of Pillow, which is not imported for this."""
    return any(cls.__module__ == "PIL.Image" for cls in type(given).__mro__)


def absolute(url: str) -> str:
    """A path as seen from any folder, as that of a rank is another; URLs stay."""
    # "::" chains file systems in fsspec's URLs, as in "zip::s3://...".
    return url if "://" in url or "::" in url else os.path.abspath(os.path.expanduser(url))
