"""A device that computes later, on the CPU: the stand-in for a GPU where one lags behind the host.

    pool.run(lagging.install)        # on each rank: from now on its main thread runs ahead

As with CUDA, an operation of torch returns at once and a queue (one thread, as one stream) computes
it later; what reads numbers waits for the queue. A sum over the ranks that is aborted does not
raise: as NCCL's kernels do, it leaves what it has in its tensors, and so do those behind it until
the group is formed again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpupool.data import device as devices
from gpupool.data.device import Counter, Device, Mark
from gpupool.engine import control
from gpupool.engine.group import abort, forming

COLLECTIVE_S = 0.003  # so long the queue needs for a sum, and falls behind
# The host has counted a tensor's version already; what is written here is not another one.
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}


class LaggingDevice(Device):
    """The CPU with a queue before it. `num_failed` sums were aborted so far."""

    lags = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_failed, self.is_aborted, self.begins = 0, False, threading.Lock()
        self._work: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._num_left = 0
        self._failure: RuntimeError | None = None
        threading.Thread(target=self._compute, name="lagging", daemon=True).start()

    def abort_collectives(self) -> int:
        """As the rank does it; the sums of this device end too."""
        abort.before_abort()
        with self.begins:  # a sum that is just begun is one of those that are aborted
            self.is_aborted = True
        return abort.abort_collectives()

    def wait_for_abort(self) -> None:
        """Wait as a kernel does for a peer that never comes."""
        while not self.is_aborted:
            time.sleep(0.001)

    def give(self, work: Callable[[], object]) -> None:
        """Have it done after all that was given before."""
        with self._changed:
            self._work.append(work)
            self._num_left += 1
            self._changed.notify_all()

    def mark(self, *, timed: bool = False) -> Mark:
        place = _Place()
        self.give(place.reach)
        return place

    def is_done(self) -> bool:
        if self._failure is not None:  # as CUDA, which reports it to whoever asks next
            error, self._failure = self._failure, None
            raise error
        return self._num_left == 0

    def synchronize(self) -> None:
        # In slices, so that an interrupt comes through, as it does from a GPU's abort.
        with self._changed:
            while not self._changed.wait_for(lambda: self._num_left == 0, 0.05):
                pass

    def counter(self) -> Counter:
        return _Count(self)

    def _compute(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work)
                work = self._work.popleft()
            with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_VERSIONS):
                try:
                    work()
                except RuntimeError as error:
                    self._failure = error
            del work
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()


class _Place:
    def __init__(self) -> None:
        self._reached, self._at_s = threading.Event(), 0.0

    def reach(self) -> None:
        self._at_s = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        while not self._reached.wait(0.05):
            pass

    def elapsed_time(self, end: _Place, /) -> float:
        return 1000 * (end._at_s - self._at_s)


class _Count:
    def __init__(self, device: LaggingDevice) -> None:
        self._device, self._value = device, 0

    def advance(self) -> None:
        self._device.give(self._add)

    def value(self) -> int:
        return self._value

    def _add(self) -> None:
        self._value += 1


class _Reads(TorchFunctionMode):
    """What reads memory without an operation of torch waits for the queue."""

    def __init__(self, device: LaggingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._device.synchronize()
        return func(*args, **(kwargs or {}))


class _Later(TorchDispatchMode):
    """Gives operations to the queue, and makes their results, which have no numbers yet."""

    def __init__(self, device: LaggingDevice, alone: dist.ProcessGroup) -> None:
        super().__init__()
        self._device, self._alone = device, alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and "allreduce_" in func.name():
            return self._all_reduce(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "c10d":
            return self._now(func, args, kwargs)
        if func.is_view or not _tensors((args, kwargs)):  # no numbers, or those of the host
            return func(*args, **kwargs)
        if not any(one.is_floating_point() for one in _tensors((args, kwargs))):
            # Sizes and indices, which C++ reads where they lie.
            return self._now(func, args, kwargs)
        try:
            made = func(*_meta(args), **_meta(kwargs))
        except (NotImplementedError, RuntimeError):  # its shape depends on numbers
            return self._now(func, args, kwargs)
        found = _results(func, args, kwargs, made)
        if found is None:
            return self._now(func, args, kwargs)
        returned, new = found
        self._device.give(lambda: _compute(func, args, kwargs, new))
        return returned

    def _now(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._device.synchronize()
        return func(*args, **kwargs)

    def _all_reduce(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not args[0][0].is_floating_point():  # that of a group which is being formed
            found = self._now(func, args, kwargs)
            self._device.is_aborted = False
            return found

        def reduce() -> None:
            time.sleep(COLLECTIVE_S)
            with self._device.begins:
                work = None if self._device.is_aborted else func(*args, **kwargs)[1]
            try:
                if work is not None:
                    work.wait()
                    return
            except (
                RuntimeError
            ):  # a peer has died: NCCL's kernels would wait until they are aborted
                self._device.wait_for_abort()
            self._device.num_failed += 1

        self._device.give(reduce)
        # The host gets a work that is over: that of a group of its own, which changes nothing.
        return func(args[0], self._alone.boxed(), *args[2:], **kwargs)


def _tensors(nest: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(nest) if isinstance(one, Tensor)]


def _meta(nest: Any) -> Any:
    def shadow(tensor: Tensor) -> Tensor:
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    nest = tree_map_only(Tensor, shadow, nest)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), nest)


def _results(
    func: Any, args: Any, kwargs: Any, made: Any
) -> tuple[Any, list[Tensor | None]] | None:
    """What an operation returns, and those of its results that are new tensors.

    None if it returns a number.
    """
    schema, values = func._schema, made if isinstance(made, tuple) else (made,)
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    written = {
        name: given[one.name]
        for one in schema.arguments
        if one.alias_info is not None and one.alias_info.is_write and one.name in given
        for name in one.alias_info.before_set
    }
    returned: list[Any] = []
    new: list[Tensor | None] = []
    for result, value in zip(schema.returns, values, strict=False):
        if result.alias_info is not None and result.alias_info.is_write:
            returned.append(written[next(iter(result.alias_info.before_set))])
            new.append(None)
        elif isinstance(value, Tensor):
            size, stride = value.size(), value.stride()
            fresh = torch.empty_strided(size, stride, dtype=value.dtype, device="cpu")
            returned.append(fresh)
            new.append(fresh)
        else:
            return None
    return (tuple(returned) if len(returned) > 1 else next(iter(returned), None)), new


def _compute(func: Any, args: Any, kwargs: Any, new: list[Tensor | None]) -> None:
    found = func(*args, **kwargs)
    for own, one in zip(new, found if isinstance(found, tuple) else (found,), strict=False):
        if own is not None:
            own.copy_(one)


def install() -> None:
    """Have the CPU of this rank lag behind its main thread, for as long as the process lives.

    All ranks call it; one that has it stays as it is.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if not isinstance(devices.of("cpu"), LaggingDevice):
        device = LaggingDevice()
        devices.put(device)
        for module in (control, forming):
            vars(module)["abort_collectives"] = device.abort_collectives
        _Reads(device).__enter__()
        _Later(device, groups[dist.get_rank()]).__enter__()


def num_failed() -> int:
    """How many sums of this rank were aborted."""
    device = devices.of("cpu")
    return device.num_failed if isinstance(device, LaggingDevice) else 0
