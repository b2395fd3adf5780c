"""Handles of what the ranks have: a value on each of them, or one that all share. On the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from gpupool.core.errors import PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.progress import progress
from gpupool.core.wire.values import ValueInfo

Variables = Any  # `variables.Variables`, which imports this file


class Composite:
    """One value per rank, which stays there until it is looked at.

    `x[rank]` fetches the rank's value, iteration and `x.gather()` those of all ranks in order;
    `len(x)` is the number of ranks. `x.info` maps each rank that has a value to its `ValueInfo`.
    `x.previous` is what the notebook's name meant before a cell assigned it; None if nothing.
    Other attributes are the attributes of the ranks' values, as a Composite: `model.weight.shape`.
    """

    def __init__(
        self,
        variables: Variables,
        name: str,
        version: int,
        *,
        path: tuple[str, ...] = (),
        previous: object = None,
    ) -> None:
        self._variables = variables
        self._name = name
        self._version = version
        self._path = path
        self.previous = previous

    @property
    def info(self) -> Mapping[int, ValueInfo]:
        """Rank -> type, shape and the like of its value; a rank without one is not there."""
        return cast(Mapping[int, ValueInfo], self._variables.look(self))

    def gather(self) -> list[Any]:
        """The values of all ranks, in order.

        Raises:
            PoolError: a rank has none, or its value cannot be fetched.
        """
        return list(self)

    def __getitem__(self, rank: int) -> Any:
        num_ranks = len(self)
        # A slice or a name would be meant for the values: the sentence says how to index these.
        if not isinstance(rank, int) or not -num_ranks <= rank < num_ranks:
            raise IndexError(
                f"{self}[{rank!r}]: a Composite has one value per rank, 0 to {num_ranks - 1}. "
                f"To index the values themselves: `%spmd {self}[{rank!r}]`."
            )
        with progress(f"Fetching {self} of rank {rank % num_ranks}"):
            return self._variables.fetch(self, rank % num_ranks)

    def __len__(self) -> int:
        return int(self._variables.world_size)

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))

    def __getattr__(self, name: str) -> Composite:
        if name.startswith("_"):  # protocols of Python and IPython: they mean the handle itself
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Asked now, not when it is used: a typo would else be an error far from its line.
        attribute = Composite(self._variables, self._name, self._version, path=(*self._path, name))
        try:
            found = attribute.info
        except PoolError as error:  # to `hasattr`, as variable viewers ask, that means no
            raise AttributeError(f"{self}.{name}: {error}") from None
        if not found:
            raise AttributeError(f"no rank's {self} has an attribute {name!r}")
        return attribute

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name != "previous":
            self._refuse()
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        # IPython asks this at each Tab; while the ranks are busy they are not waited for.
        return sorted({*super().__dir__(), *self._variables.attributes(self)})

    def _refuse(self, *_: object) -> Any:
        raise TypeError(
            f"{self} is on the ranks: change it, call it, compare and compute with it there, in a "
            f"%%spmd cell; or use the value of one rank, {self}[0], or of all, {self}.gather()."
        )

    # Without `__bool__`, `if x:` would always be true, whatever the ranks have.
    __bool__ = __float__ = __int__ = __call__ = __setitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __matmul__ = _refuse

    # pickle would take `_variables` along, and with it the pool.
    def __reduce__(self) -> Any:
        raise PoolError(f"{self} is a handle of values on the ranks; {self}.gather() fetches them.")

    def __str__(self) -> str:
        return ".".join((self._name, *self._path))

    def __repr__(self) -> str:
        return f"Composite({self}, {rank_count(len(self))})"


def key_of(composite: Composite) -> tuple[str, tuple[str, ...], int]:
    """(name, path of attributes, version): what it means on a rank.

    Not a property: those names belong to the attributes of the ranks' values.
    """
    return composite._name, composite._path, composite._version


def pool_variables(handle: Composite | Constant) -> Variables:
    """The variables that it is one of."""
    return handle._variables


def value_of(value: Any) -> Any:
    """A value; of a Constant the value that the ranks have, in memory that is shared with them."""
    return value._variables.value_of(value) if isinstance(value, Constant) else value


class Constant:
    """A value that every rank has, made by `pool.put`: in a cell its name means the value itself.

    The ranks of a host share its memory until one of them writes to it. It is released when
    nothing in the notebook refers to it any more.
    """

    def __init__(self, variables: Variables, number: int, kind: str) -> None:
        self._variables = variables
        self.number = number
        self._kind = kind

    # The collector runs this in any thread, at any moment: `release` only appends to a list.
    def __del__(self) -> None:
        self._variables.release(self.number)

    def __reduce__(self) -> Any:
        raise PoolError(f"{self!r} means something on the ranks of its pool only.")

    def __repr__(self) -> str:
        return f"Constant({self._kind}, on {rank_count(self._variables.world_size)})"
