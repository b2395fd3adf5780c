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
    return same_kind(state, {name: _copied(value) for name, value in state.items()})


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """`model.load_state_dict(state)`, also of buffers that a network makes while it computes.

    Such a one was registered as None, and is that until the first batch.
    """
    import torch

    own = model.state_dict()
    device = next((value.device for value in own.values() if isinstance(value, torch.Tensor)), None)
    for name in state.keys() - own.keys():
        path, _, last = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:  # of another network, as torch is going to say
            continue
        if getattr(module, last, 0) is None and isinstance(state[name], torch.Tensor):
            setattr(module, last, torch.empty_like(state[name], device=device))
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
        raise _refusal(f"{type(error).__name__}: {error}") from None
    if refused:
        raise _refusal(f"{', '.join(sorted(refused))} would run code when it is read")


def check_extra_state(model: nn.Module) -> None:
    """Raise TrainingError if what a module keeps beside tensors would be lost."""
    for name, module in model.named_modules():
        if _overrides(module, "get_extra_state"):
            if not _overrides(module, "set_extra_state"):
                raise _refusal(f"module {name!r} has no set_extra_state that takes it back")
            save(module.get_extra_state(), io.BytesIO())


class ExtraState:
    """What the modules of a network keep beside tensors, to be noted and given back.

    Costs nothing where no module has any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if _overrides(m, "get_extra_state")]

    def note(self) -> list[Any]:
        """A copy of it, of each module."""
        return [copy.deepcopy(module.get_extra_state()) for module in self._modules]

    def put_back(self, noted: list[Any]) -> None:
        """Make it what was noted, of these modules or of those of a copy of the network."""
        for module, state in zip(self._modules, noted, strict=True):
            module.set_extra_state(copy.deepcopy(state))


def same_kind(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """These values with what torch notes about the state: the versions of its modules."""
    made: OrderedDict[str, Any] = OrderedDict(values)
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]
    return made


def _refusal(why: str) -> TrainingError:
    return TrainingError(
        f"what is kept beside tensors cannot be saved: {why}. Give numbers, strings, bytes, "
        "tensors, and lists or dicts of them, also from get_extra_state."
    )


def _overrides(module: nn.Module, method: str) -> bool:
    from torch import nn

    return getattr(type(module), method) is not getattr(nn.Module, method)


def _copied(value: Any) -> Any:
    """A copy of a nest with its tensors on the CPU."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, OrderedDict):
        return copied(value)
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)
