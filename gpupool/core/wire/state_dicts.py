"""State dicts that hold more than tensors, as `get_extra_state` of modules gives it.

Runs anywhere; imports torch when used.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def copied(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict that later steps do not change: its tensors are on the CPU."""
    return same_kind(state, {name: _on_cpu(value, copies=True) for name, value in state.items()})


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as `torch.load(weights_only=True)` reads it, for `unpacked`.

    Tensors are on the CPU. What would be refused is pickled: only for files of one's own.
    """
    import cloudpickle

    values = {name: _on_cpu(value, copies=False) for name, value in state.items()}
    pickled = {
        name: cloudpickle.dumps(value) for name, value in values.items() if refused(value) != ""
    }
    rest = {name: value for name, value in values.items() if name not in pickled}
    return {"state": same_kind(state, rest), "pickled": pickled}


def unpacked(found: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The state dict that was `packed`; runs what is in its pickles."""
    state: OrderedDict[str, Any] = found["state"]
    pickled = found["pickled"].items()
    state.update({name: pickle.loads(value) for name, value in pickled})  # nosec B301 # of a rank
    return state


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


def refused(value: Any, name: str = "it") -> str:
    """What in a nest `torch.load(weights_only=True)` would not read; "" if it would.

    >>> refused({"a": [1, None, b"b"]}), refused({"a": [1, range(3)]}, "state")
    ('', 'state.a.1 is of class range')
    """
    for path, leaf in _leaves(value, name):
        if not _is_read(leaf):
            return f"{path} is of class {type(leaf).__name__}"
    return ""


def check_extra_state(model: nn.Module, *, in_checkpoints: bool) -> None:
    """Raise TrainingError, naming the module, if what a module keeps beside tensors would be lost.

    `in_checkpoints`: it is also to be kept in files that are read without running code.
    """
    import cloudpickle

    for name, module in model.named_modules():
        what = f"the model's module {name!r} ({type(module).__name__})" if name else "the model"
        if not _overrides(module, "get_extra_state"):
            continue
        if not _overrides(module, "set_extra_state"):
            raise TrainingError(
                f"{what} has get_extra_state, and no set_extra_state that takes it back; add one, "
                "or the trained network cannot be given what it kept.",
                "no set_extra_state",
                name,
            )
        state = module.get_extra_state()
        try:
            pickle.loads(cloudpickle.dumps(copy.deepcopy(state)))  # nosec B301 # made here
        except Exception as error:  # it runs arbitrary code of the objects' classes
            raise TrainingError(
                f"{what} gives from get_extra_state what cannot be copied "
                f"({type(error).__name__}: {error}); give there what can be pickled.",
                "no copy",
                name,
            ) from None
        if in_checkpoints and (found := refused(state)):
            raise TrainingError(
                f"{what} gives from get_extra_state what no checkpoint can hold ({found}, which is "
                "not read without running code); give tensors, numbers, strings, bytes, lists or "
                "dicts of them there, or train without checkpoint.",
                "extra state",
                name,
            )


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
    return with_versions(values, getattr(state, "_metadata", None))


def with_versions(values: Mapping[str, Any], versions: Any) -> OrderedDict[str, Any]:
    """These values as a state dict of modules of these versions; None: nothing is known of them."""
    made: OrderedDict[str, Any] = OrderedDict(values)
    if versions is not None:
        made._metadata = versions  # type: ignore[attr-defined]
    return made


def _overrides(module: nn.Module, method: str) -> bool:
    from torch import nn

    return getattr(type(module), method) is not getattr(nn.Module, method)


def _on_cpu(value: Any, *, copies: bool) -> Any:
    """The same nest with its tensors on the CPU."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=copies)
    if type(value) in (dict, OrderedDict):
        nest = {key: _on_cpu(one, copies=copies) for key, one in value.items()}
        return nest if type(value) is dict else same_kind(value, nest)
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(one, copies=copies) for one in value)
    return copy.deepcopy(value) if copies else value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(value) in (dict, OrderedDict):
        for key, one in value.items():
            yield f"a key of {path}", key
            yield from _leaves(one, f"{path}.{key}")
    elif type(value) in (list, tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{path}.{number}")
    else:
        yield path, value


def _is_read(leaf: Any) -> bool:
    import torch

    if type(leaf) in _PLAIN or isinstance(leaf, torch.Tensor):
        return True
    file = io.BytesIO()
    try:  # torch alone knows, and may know more classes by now
        torch.save(leaf, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # of the pickle, or of what the class does while it is pickled
        return False
    return True
