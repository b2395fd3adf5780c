"""Handles of what the ranks have: a value on each of them, or one that all share. On the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gpupool.core.errors import PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.progress import progress
from gpupool.core.wire.values import ValueInfo
from gpupool.pool.variables.losses import Losses


class Variables(Protocol):
    """What a handle asks of those it is one of: `gpupool.pool.variables.variables.Variables`."""

    losses: Losses
    num_changes: int

    @property
    def world_size(self) -> int: ...
    def look(self, composite: Composite, text_chars: int = 0) -> dict[int, ValueInfo]: ...
    def attributes(self, composite: Composite) -> list[str]: ...
    def fetch(self, composite: Composite, rank: int) -> Any: ...
    def value_of(self, constant: Constant) -> Any: ...
    def release(self, number: int) -> None: ...


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
        info: Mapping[int, ValueInfo] | None = None,
        *,
        path: tuple[str, ...] = (),
        previous: object = None,
    ) -> None:
        self._variables = variables
        self._name = name
        self._version = version
        self._info = info
        self._num_changes = variables.num_changes  # when the info was taken
        self._path = path
        self.previous = previous

    @property
    def info(self) -> Mapping[int, ValueInfo]:
        """Rank -> type, shape and the like of its value; a rank without one is not there."""
        num_changes = self._variables.num_changes
        # A cell gives a new handle; sync and replaced ranks change what an old one stands for.
        if self._info is None or self._num_changes != num_changes:
            self._info, self._num_changes = self._variables.look(self), num_changes
        return self._info

    def gather(self) -> list[Any]:
        """The values of all ranks, in order.

        Raises:
            PoolError: a rank has none, or its value cannot be fetched.
        """
        values = []
        with progress(f"Fetching {self}", len(self), "ranks") as bar:
            for rank in range(len(self)):
                values.append(self._variables.fetch(self, rank))
                bar.advance()
        return values

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
        return self._variables.world_size

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
            lost = self._variables.losses.sentence(self._name)
            why = f": {lost}" if lost else ""
            raise AttributeError(f"no rank's {self} has an attribute {name!r}{why}")
        return attribute

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name != "previous":
            raise TypeError(
                f"{self} is on the ranks: `{self}.{name} = ...` belongs in a %%spmd cell."
            )
        super().__setattr__(name, value)

    def __setitem__(self, rank: object, value: object) -> None:
        raise TypeError(f"{self} is on the ranks: assign to it there, in a %%spmd cell.")

    def __dir__(self) -> list[str]:
        # IPython asks this at each Tab; while the ranks are busy they are not waited for.
        return sorted({*super().__dir__(), *self._variables.attributes(self)})

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise TypeError(f"{self} is on the ranks: call it there, `%spmd {self}(...)`.")

    # Without this `if x:` would always be true, whatever the ranks have.
    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of {self} may differ from rank to rank: ask for that of one, "
            f"`bool({self}[0])`."
        )

    def _refuse_numbers(self, *_: object) -> Any:
        raise TypeError(
            f"{self} is on the ranks: compute with it there, in a %%spmd cell, or with the value "
            f"of one rank, {self}[0], or of all, {self}.gather()."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_numbers
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __matmul__ = _refuse_numbers
    __float__ = __int__ = _refuse_numbers

    # pickle would take `_variables` along, and with it the pool.
    def __reduce__(self) -> Any:
        raise PoolError(
            f"{self} is a handle of values on the ranks and means nothing elsewhere; "
            f"{self}.gather() fetches them."
        )

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
        variables = self.__dict__.get("_variables")  # `__init__` may have failed
        if variables is not None:
            variables.release(self.number)

    def __reduce__(self) -> Any:
        raise PoolError(f"{self!r} means something on the ranks of its pool only.")

    def __repr__(self) -> str:
        return f"Constant({self._kind}, on {rank_count(self._variables.world_size)})"
