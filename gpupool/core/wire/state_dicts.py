"""State dicts that hold more than tensors, as `get_extra_state` of modules gives it.

Runs anywhere; imports torch when used.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import nn


def copied(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict that later steps do not change: its tensors are on the CPU."""
    from torch import Tensor

    copies = {
        name: one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else copy.deepcopy(one)
        for name, one in state.items()
    }
    return same_kind(state, copies)


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """`model.load_state_dict(state)`, also of buffers that a network makes while it computes.

    Such a one was registered as None, and is that until the first batch.
    """
    own, modules = model.state_dict(), dict(model.named_modules())
    device = next((one.device for one in own.values() if hasattr(one, "device")), None)
    for name in state.keys() - own.keys():
        path, _, last = name.rpartition(".")
        if path in modules and getattr(modules[path], last, 0) is None:
            setattr(modules[path], last, state[name].to(device))
    model.load_state_dict(state)


def save(state: Any, file: IO[bytes]) -> None:
    """`torch.save(state, file)` of what `torch.load(weights_only=True)` is going to read.

    Raises TrainingError if the file, which has been written then, holds anything else.
    """
    import torch

    try:
        torch.save(state, file)
        file.seek(0)
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        file.seek(0, io.SEEK_END)
    except Exception as error:  # pickling runs arbitrary code of the objects' classes
        refused = [f"{type(error).__name__}: {error}"]
    if refused:
        raise TrainingError(
            f"what is kept beside tensors cannot be saved ({', '.join(sorted(refused))}). Give "
            "numbers, strings, bytes, tensors, and lists or dicts of them, also from "
            "get_extra_state."
        )


def check_extra_state(model: nn.Module) -> None:
    """Raise TrainingError if what a module keeps beside tensors would be lost."""
    save([module.get_extra_state() for module in _modules_with_more(model)], io.BytesIO())


class ExtraState:
    """What the modules of a network keep beside tensors, to be noted and given back.

    Costs nothing where no module has any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = _modules_with_more(model)

    def note(self) -> list[Any]:
        """A copy of it, of each module."""
        return [copy.deepcopy(module.get_extra_state()) for module in self._modules]

    def put_back(self, noted: list[Any]) -> None:
        """Make it what was noted, of these modules or of those of a copy of the network."""
        for module, state in zip(self._modules, noted, strict=True):
            module.set_extra_state(state)


def same_kind(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """These values with what torch notes about the state: the versions of its modules."""
    made: OrderedDict[str, Any] = OrderedDict(values)
    made._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return made


def _modules_with_more(model: nn.Module) -> list[nn.Module]:
    from torch import nn

    none = nn.Module.get_extra_state
    return [module for module in model.modules() if type(module).get_extra_state is not none]
