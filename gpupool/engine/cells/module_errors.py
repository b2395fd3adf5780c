"""What torch's own error leaves out: which module of the network it is, what that takes, and got.

Runs on engines. Nothing is hooked: a traceback holds the frames in which torch has called modules,
and those have the modules and their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parallel import DistributedDataParallel

from gpupool.engine.shell.cell_names import TORCH, is_users

_MODULE, _FUNCTIONAL = f"{TORCH}nn/modules/module.py", f"{TORCH}nn/functional.py"
_CLASS_LOSSES = ("cross_entropy", "nll_loss")
_MAX_REPR = 120
_SPACE = ("L", "H, W", "D, H, W")  # dimensions of what a convolution takes
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.")
_TRANSFORM = "apply_transform"  # of `data/reading/samples.py`, which calls those of data sets
_AS_TENSORS = "pictures come as uint8 tensors (channels, height, width), and networks get them as "
_FLOATS = "float32 in 0..1"


def explained(text: str, error: BaseException, frames: Sequence[FrameType]) -> str:
    """`text`, what an error says, with the module, what it takes and what to do; else as it is.

    Args:
        frames: all of its traceback, the outermost first.
    """
    if not isinstance(error, (RuntimeError, ValueError, IndexError, TypeError)):
        return text
    try:
        if any(frame.f_code.co_name == _TRANSFORM for frame in frames):
            return _of_transform(text, frames)
        last = next((i for i in reversed(range(len(frames))) if _calls_module(frames[i])), None)
        behind = frames if last is None else frames[last + 1 :]
        if (loss := next(filter(_is_class_loss, behind), None)) is not None:
            return _of_targets(text, loss.f_locals["input"], loss.f_locals["target"])
        if last is None or any(is_users(frame.f_code.co_filename) for frame in behind):
            return text  # the line of the user says where it is
        return _of_module(text, [frame.f_locals for frame in frames if _calls_module(frame)])
    except Exception:  # an explanation must not take the error's place
        return text


# ---- modules ---------------------------------------------------------------------------------


def _calls_module(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "_call_impl" and code.co_filename == _MODULE


def _of_module(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """`text` with the innermost of the modules that were called, the outermost first."""
    calls = [call for call in calls if not isinstance(call["self"], DistributedDataParallel)]
    network, module = calls[0]["self"], calls[-1]["self"]
    if f"{type(module).__name__}.forward()" in text:  # arguments are missing, of that one
        return text
    name = next((name for name, one in network.named_modules() if one is module), "")
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    shown = repr(module)
    if "\n" in shown or len(shown) > _MAX_REPR:
        shown = type(module).__name__
    head = f"{name} ({shown}): {text}" if name else f"{shown}: {text}"
    given, first = _first(calls[-1]), _first(calls[0])
    wants = _wants(module)
    if given is None or wants is None:
        return head
    problem = _type_problem(wants, given, first) or _size_problem(wants, given, first)
    if not problem:
        return head
    return f"{head.rstrip('.')}; it takes {wants}, and got {described(given)}: {problem}"


class _Wants(NamedTuple):
    """What a module takes: the type, and `size` (its `argument`) in dimension `axis`."""

    dtypes: tuple[torch.dtype, ...]
    shape: str
    argument: str = ""
    size: int = 0
    axis: int = -1

    def __str__(self) -> str:
        return f"{_name(self.dtypes[0])} {self.shape}"


def _wants(module: nn.Module) -> _Wants | None:
    if isinstance(module, nn.Embedding):
        numbers = f"numbers from 0 to {module.num_embeddings - 1}"
        return _Wants((torch.int64, torch.int32), numbers, "num_embeddings", module.num_embeddings)
    floating = (p.dtype for p in module.parameters(recurse=False) if p.is_floating_point())
    dtypes = (next(floating, torch.get_default_dtype()),)
    if isinstance(module, nn.Linear):
        size = module.in_features
        return _Wants(dtypes, f"(..., {size})", "in_features", size)
    if isinstance(module, _ConvNd):
        size, num = module.in_channels, len(module.kernel_size)
        is_first = isinstance(module, _ConvTransposeNd) or module.groups == 1
        argument = "in_channels" if is_first else ""
        return _Wants(dtypes, f"(N, {size}, {_SPACE[num - 1]})", argument, size, -num - 1)
    if isinstance(module, (_NormBase, nn.GroupNorm)):
        argument = "num_channels" if isinstance(module, nn.GroupNorm) else "num_features"
        size = int(getattr(module, argument))
        return _Wants(dtypes, f"(N, {size}, ...)", argument, size, 1)
    if isinstance(module, nn.LayerNorm):
        sizes = module.normalized_shape
        return _Wants(dtypes, f"(..., {', '.join(map(str, sizes))})", "normalized_shape", sizes[-1])
    if isinstance(module, nn.RNNBase):
        size = module.input_size
        return _Wants(dtypes, f"(..., {size})", "input_size", size)
    if isinstance(module, nn.MultiheadAttention):
        return _Wants(dtypes, f"(..., {module.embed_dim})", "embed_dim", module.embed_dim)
    return None


def _type_problem(wants: _Wants, given: Tensor, first: Tensor | None) -> str:
    """What to do about the type of what was given, or ""."""
    if given.dtype in wants.dtypes or torch.is_autocast_enabled(given.device.type):
        return ""
    wanted = wants.dtypes[0]
    short = {torch.float32: ".float()", torch.int64: ".long()"}
    convert = short.get(wanted, f".to({wanted})")
    if given.dtype == torch.uint8 and wanted.is_floating_point:
        convert += ".div(255)"
    if first is not None and first.dtype == given.dtype:
        return f"give the inputs as {_name(wanted)} (`{convert}` in the data set)"
    return f"convert what comes before it (`{convert}`)"


def _size_problem(wants: _Wants, given: Tensor, first: Tensor | None) -> str:
    """The same about its size, or about numbers outside of an embedding."""
    other = "give it other inputs" if given is first else "change what comes before it"
    if wants.argument == "num_embeddings":
        # On a GPU to read them would wait for it, and torch raises elsewhere there.
        if given.device.type != "cpu" or not given.numel():
            return ""
        low, high = (int(value) for value in given.aminmax())
        if low >= 0 and high < wants.size:
            return ""
        many = f"make num_embeddings {high + 1}" if low >= 0 else "no number may be negative"
        return f"numbers from {low} to {high}; {many}, or {other}"
    if not -given.ndim <= wants.axis < given.ndim:
        return f"its number of dimensions is another one; {other}"
    found = given.shape[wants.axis]
    if found == wants.size or not wants.argument:
        return ""
    return f"make its {wants.argument} {found}, or {other}"


def _first(call: Mapping[str, Any]) -> Tensor | None:
    """The first tensor that a module was called with."""
    given: Iterator[Any] = iter((*call.get("args", ()), *call.get("kwargs", {}).values()))
    return next((one for one in given if isinstance(one, Tensor)), None)


# ---- targets, transforms ---------------------------------------------------------------------


def _is_class_loss(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in _CLASS_LOSSES and code.co_filename == _FUNCTIONAL


def _of_targets(text: str, outputs: Any, targets: Any) -> str:
    """`text` with what a loss over classes takes."""
    said = text.rstrip(".")
    num = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    if "out of bounds" in text:
        return (
            f"{said}: the network has {num} outputs, for the classes 0 to {num - 1}. Give its last "
            "layer as many outputs as there are classes (gpupool.replace_head), or number the "
            "classes from 0"
        )
    if targets.dtype not in (torch.int64, torch.uint8) and targets.shape != outputs.shape:
        return (
            f"{said}: a loss over classes takes the targets as int64 class numbers, and got "
            f"{described(targets)}. Give them as int64 (`.long()` in the data set), or choose "
            'another loss, such as "mse"'
        )
    return f"{said}; the outputs are {described(outputs)}, the targets {described(targets)}"


def _of_transform(text: str, frames: Sequence[FrameType]) -> str:
    """`text` with how pictures come to a transform, where torchvision expected them otherwise."""
    if not any("/torchvision/transforms/" in frame.f_code.co_filename for frame in frames):
        return text
    if "should be PIL Image or ndarray" in text:
        return f"{text}: {_AS_TENSORS}{_FLOATS}; leave ToTensor or PILToTensor out"
    if "should be a float tensor" in text:
        return (
            f"{text.rstrip('.')}: {_AS_TENSORS}{_FLOATS}; leave Normalize out, and use "
            "ds.with_normalization(mean, std)"
        )
    return text


def described(tensor: Tensor) -> str:
    """The type and the shape of a tensor.

    >>> described(torch.zeros(64, 10))
    'float32 64 x 10'
    """
    return f"{_name(tensor.dtype)} {' x '.join(map(str, tensor.shape))}".rstrip()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
