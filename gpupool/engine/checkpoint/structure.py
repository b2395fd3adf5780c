"""The structure of a network as plain data, and back again without running code of the file.

Runs anywhere; imports torch when used. `described` gives what a file can hold: the class of each
module by name, its attributes, and where its tensors are in the state dict. `built` makes modules
of it: classes of torch, torchvision and timm, and those defined in the notebook. No constructor is
called, and an attribute can only be a number, a text, a nest of them, or one of these classes, so a
hostile file can make a strange network, and do nothing else.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

_TRUSTED = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.", "timm.")
_NOTEBOOK = "__main__"
_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_NESTS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_FUNCTIONS = ("relu", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "softmax", "mish")
_OF_RNNS = "_flat_weight_refs"  # weak references, which the module makes again


class NotPlainError(Exception):
    """A network has what no plain data can say, or a file names what is not to be trusted."""


def described(model: nn.Module, left_out: str) -> list[dict[str, Any]]:
    """The modules of a network, the network itself first; without its attribute `left_out`.

    Raises NotPlainError, saying what, for an attribute of another kind.
    """
    places = {id(module): name for name, module in model.named_modules()}
    tensors: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(value), name)  # one that is shared has its first name
    return [_one(name, module, places, tensors, left_out) for name, module in model.named_modules()]


def built(found: list[dict[str, Any]], state: Mapping[str, Tensor]) -> nn.Module:
    """The network, with the tensors of `state`.

    Raises NotPlainError for a class that is not to be trusted, KeyError and others for a structure
    that is none.
    """
    from torch import nn

    modules: dict[str, nn.Module] = {}
    for one in found:
        cls = _class(one["class"])
        if not issubclass(cls, nn.Module):
            raise NotPlainError(f"{one['class']} is no network")
        module: nn.Module = cls.__new__(cls)
        nn.Module.__init__(module)
        modules[one["name"]] = module
    parameters: dict[str, nn.Parameter] = {}
    for one in found:
        for of_state in one["parameters"].values():
            if of_state is not None and of_state[0] not in parameters:
                tensor, trains = state[of_state[0]], bool(of_state[1])
                parameters[of_state[0]] = nn.Parameter(tensor, requires_grad=trains)
    shared = {**state, **parameters}
    for one in found:
        module = modules[one["name"]]
        for name, of_state in one["parameters"].items():
            module.register_parameter(name, None if of_state is None else parameters[of_state[0]])
        for name, (value, persists) in one["buffers"].items():
            buffer = shared[value] if isinstance(value, str) else value
            module.register_buffer(name, buffer, persistent=bool(persists))
        for name, place in one["children"].items():
            module.add_module(name, None if place is None else modules[place])
        # A file may not put anything in the place of a method, or of what makes a module.
        for name in one["plain"]:
            is_of_modules = name in nn.Module().__dict__ and name != "training"
            if is_of_modules or callable(getattr(type(module), str(name), None)):
                raise NotPlainError(f"{name} of {one['class']}, which is no attribute")
        # Past `__setattr__`, which a class may have made its own.
        module.__dict__.update(
            {str(name): _decoded(value, modules, shared) for name, value in one["plain"].items()}
        )
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return modules[""]


def _one(
    place: str,
    module: nn.Module,
    places: Mapping[int, str],
    tensors: Mapping[int, str],
    left_out: str,
) -> dict[str, Any]:
    from torch import nn

    cls, usual = type(module), nn.Module().__dict__
    for name, value in usual.items():
        hooks = module.__dict__.get(name)
        if name.endswith("hooks") and hooks and not isinstance(value, bool):
            raise NotPlainError(f"{place or 'it'} has hooks")
    plain = {
        name: _encoded(value, f"{place}.{name}".lstrip("."), places, tensors)
        for name, value in module.__dict__.items()
        if (name not in usual or name == "training") and name not in (left_out, _OF_RNNS)
    }
    return {
        "name": place,
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "plain": plain,
        "parameters": {
            name: None if one is None else (tensors[id(one)], one.requires_grad)
            for name, one in module._parameters.items()
        },
        "buffers": {
            name: (
                one if one is None or id(one) not in tensors else tensors[id(one)],
                name not in module._non_persistent_buffers_set,
            )
            for name, one in module._buffers.items()
        },
        "children": {
            name: None if one is None else places[id(one)] for name, one in module._modules.items()
        },
    }


def _encoded(value: Any, path: str, places: Mapping[int, str], tensors: Mapping[int, str]) -> Any:
    """A scalar as it is, anything else as (kind, what it is)."""
    import torch
    from torch.nn import functional

    def inner(one: Any) -> Any:
        return _encoded(one, path, places, tensors)

    if type(value) in _SCALARS:
        return value
    if isinstance(value, torch.nn.Module) and id(value) in places:
        return "module", places[id(value)]
    if isinstance(value, torch.Tensor) and id(value) in tensors:
        return "state", tensors[id(value)]
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.Size):
        return "tuple", list(value)
    kind = type(value).__name__
    if type(value) is _NESTS.get(kind):
        return kind, [inner(one) for one in value]
    if isinstance(value, dict) and kind in ("dict", "OrderedDict"):
        return "dict", [(inner(key), inner(one)) for key, one in value.items()]
    if isinstance(value, type):
        return "class", f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, functools.partial):
        return "partial", [inner(value.func), inner(value.args), inner(value.keywords)]
    for name in _FUNCTIONS:
        if value is getattr(functional, name) or value is getattr(torch, name, None):
            return "function", name
    raise NotPlainError(f"{path} is a {kind}")


def _decoded(value: Any, modules: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    import torch

    if type(value) in _SCALARS:
        return value
    kind, what = value
    if kind in _NESTS:
        return _NESTS[kind](_decoded(one, modules, tensors) for one in what)
    if kind == "dict":
        pairs = [[_decoded(one, modules, tensors) for one in pair] for pair in what]
        return dict(pairs)
    if kind == "partial":
        function, given, named = (_decoded(one, modules, tensors) for one in what)
        return functools.partial(function, *given, **named)
    if kind == "function" and what in _FUNCTIONS:
        return getattr(torch.nn.functional, what)
    if kind == "dtype" and isinstance(dtype := getattr(torch, what), torch.dtype):
        return dtype
    if kind == "class":
        return _class(what)
    return {"module": modules, "state": tensors}[kind][what]


def _class(name: str) -> type:
    """A class of a network by name; raises NotPlainError for one that is not to be trusted."""
    from torch import nn

    place, _, path = name.partition(":")
    if place != _NOTEBOOK and not f"{place}.".startswith(_TRUSTED):
        raise NotPlainError(f"{path} of {place}")
    try:
        found: Any = sys.modules[place] if place == _NOTEBOOK else importlib.import_module(place)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, KeyError):
        raise NotPlainError(f"{path} of {place}, which is not there") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise NotPlainError(f"{path} of {place}, which is no network")
    return found
