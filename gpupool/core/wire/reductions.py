"""What is pickled in place of things that cloudpickle cannot carry, or changes. Runs anywhere."""

from __future__ import annotations

import inspect
import io
import pickle
import pkgutil
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar, copy_context
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType
from typing import Any, TypeVar

import cloudpickle
from cloudpickle.cloudpickle import _code_reduce, _make_skeleton_class

Made = TypeVar("Made")
Cached: Any = type(lru_cache(int))  # what `functools.cache` makes too

# id of an object -> "module:name" that it is imported by, if things may travel so
_imports: ContextVar[Mapping[int, str] | None] = ContextVar("imports", default=None)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which carries more."""

    def reducer_override(self, obj: Any) -> Any:
        found = (_imports.get() or {}).get(id(obj))
        if found and not _can_pickle(obj):
            return pkgutil.resolve_name, (found,)
        if isinstance(obj, type):
            return _reduced_class(obj, super().reducer_override(obj))
        return _reduced(obj) or super().reducer_override(obj)


def dumps(value: object) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def with_imports_by_name(pack: Callable[[], Made]) -> Made:
    """What `pack` gives; if it fails, once more, with what imports give travelling by its name.

    So a logger crosses which holds a lock, and is on the other side what an import gives there.
    """
    try:
        return pack()
    # what classes raise that refuse to be pickled
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        found: dict[int, str] = {}
        # The longest first: of several modules that have it, the shortest name is meant.
        for module in sorted(sys.modules.keys() - {"__main__", "__mp_main__"}, key=len)[::-1]:
            space = dict(getattr(sys.modules.get(module), "__dict__", {}))
            found |= {id(one): f"{module}:{n}" for n, one in space.items() if n[:1] != "_"}
        context = copy_context()
        context.run(_imports.set, found)
        return context.run(pack)


def _can_pickle(obj: object) -> bool:
    try:
        Context().run(dumps, obj)  # where nothing travels by its name
    except Exception:  # code of its class
        return False
    return True


def _reduced(obj: Any) -> tuple[Any, ...] | None:
    """The reduction of such a thing, as `__reduce__` gives it; None for anything else."""
    if isinstance(obj, FunctionType):
        return _reduced_compiled(obj)
    if isinstance(obj, CodeType):
        # cloudpickle 3.1.3 leaves out the file, by which tracebacks find a cell and its lines.
        # Copied, as cloudpickle copies names: else the pickle depends on which strings are shared.
        _, parts = _code_reduce(obj)
        return code, ("".join(obj.co_filename), *parts)
    if isinstance(obj, Cached):
        if obj.__module__ != "__main__" and "<" not in getattr(obj, "__qualname__", "<"):
            return None  # of a module: it is found there by its name
        parameters = obj.cache_parameters()
        return cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"]), vars(obj)
    if isinstance(obj, memoryview):
        view(obj, obj.format, obj.shape)  # some cannot be made again
        return view, (pickle.PickleBuffer(obj), obj.format, obj.shape)
    if isinstance(obj, cached_property):  # until Python 3.12 there is a lock in it
        kept = {key: value for key, value in vars(obj).items() if key != "lock"}
        return cached_property, (obj.func,), kept
    if isinstance(obj, weakref.WeakKeyDictionary):  # in what `functools.singledispatch` makes
        return type(obj), (dict(obj),)
    parametrize: Any = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize and isinstance(obj, parametrize.Module) and parametrize.is_parametrized(obj):
        # torch gives it a class of its own, which refuses to be pickled into files. It travels.
        return object.__new__, (type(obj),), vars(obj)
    return None


def code(filename: str, *parts: Any) -> CodeType:
    return CodeType(*parts).replace(co_filename=filename)


def cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    """The function with an empty cache: each process fills its own."""
    return lru_cache(maxsize, typed)(function)


def view(data: Any, format: Any, shape: Any) -> Any:
    return memoryview(data).cast("B").cast(format, shape)


def compiled(function: Any, backend: Any, dynamic: bool | None, fullgraph: bool) -> Any:
    """The function as torch.compile makes it: machine code is made where it runs."""
    import torch

    return torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


def _reduced_compiled(function: FunctionType) -> tuple[Any, ...] | None:
    """torch pickles a compiled module, as the module and how it is compiled, but no function."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or function.__code__.co_filename != dynamo.__file__:
        return None
    names = inspect.getclosurevars(function).nonlocals
    context = names.get("self")
    if not isinstance(context, dynamo.OptimizeContext):
        return None
    backend = dynamo.innermost_backend(context.callback)
    return compiled, (names["fn"], backend, context._dynamic, context.fullgraph)


def _reduced_class(kind: type, reduction: Any) -> Any:
    """cloudpickle's reduction of a class, with the class's whole name and `make_class`."""
    if not isinstance(reduction, tuple) or reduction[0] is not _make_skeleton_class:
        return reduction
    _, (meta, name, bases, names, *more), *rest = reduction
    names = {**names, "__qualname__": kind.__qualname__}
    return make_class, (meta, name, bases, names, *more), *rest


def make_class(meta: Any, name: str, bases: tuple[Any, ...], *rest: Any) -> Any:
    """A class that is still empty, by cloudpickle; but the notebook's code does not hear of it.

    Its metaclass and its bases' `__init_subclass__` have seen it when it was made: what they noted
    travels with the values in which they noted it.
    """
    above = {kind for base in types.resolve_bases(bases) for kind in base.__mro__}
    ours = {kind: vars(kind).get("__init_subclass__") for kind in filter(_is_of_notebook, above)}
    hooks = {kind: hook for kind, hook in ours.items() if hook is not None}
    for kind in hooks:
        type.__delattr__(kind, "__init_subclass__")
    try:
        if _is_of_notebook(meta):
            maker = next(kind for kind in meta.__mro__ if not _is_of_notebook(kind))
            meta = partial(maker.__new__, meta)
        return _make_skeleton_class(meta, name, bases, *rest)
    finally:
        for kind, hook in hooks.items():
            type.__setattr__(kind, "__init_subclass__", hook)


def _is_of_notebook(kind: type) -> bool:
    return kind.__module__ == "__main__"
