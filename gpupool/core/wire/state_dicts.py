"""State dicts, also of what `get_extra_state` gives. Runs anywhere; imports torch when used."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import nn


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """`model.load_state_dict(state)`, also of buffers that a network makes while it computes.

    Such a one was registered as None, and is that until the first batch. What a `state_dict` of the
    network's own leaves out, because it does not train, say, stays as it is.
    """
    own, modules = model.state_dict(), dict(model.named_modules())
    device = next((one.device for one in own.values() if hasattr(one, "device")), None)
    for name in state.keys() - own.keys():
        path, _, last = name.rpartition(".")
        if path in modules and getattr(modules[path], last, 0) is None:
            setattr(modules[path], last, state[name].to(device))
    leaves_out = any(name not in own for name, _ in model.named_parameters())
    if leaves_out and (missing := sorted(own.keys() - state.keys())):
        raise RuntimeError(f"Missing key(s): {', '.join(missing)}")
    model.load_state_dict(state, strict=not leaves_out)


def save(state: Any, file: IO[bytes]) -> None:
    """`torch.save(state, file)`; then a TrainingError if `weights_only=True` would not read it."""
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
    from torch import nn

    none = nn.Module.get_extra_state
    keeping = [module for module in model.modules() if type(module).get_extra_state is not none]
    save([module.get_extra_state() for module in keeping], io.BytesIO())
