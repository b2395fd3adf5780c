"""What a user can choose, as frozen dataclasses that are validated once. Runs anywhere.

Magics and views read names and defaults from here and repeat none. A wrong value raises
`OptionsError` with the value, what is allowed and what to do.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from gpupool.core.errors import OptionsError
from gpupool.core.options import other_names
from gpupool.core.urls import refuse_typo, without_passwords

Device: TypeAlias = Literal["auto", "cpu", "gpu"]
Backend: TypeAlias = Literal["auto", "nccl", "gloo"]
OnHang: TypeAlias = Literal["tell", "abort"]
DEVICES: tuple[str, ...] = get_args(Device)
BACKENDS: tuple[str, ...] = get_args(Backend)
ON_HANG: tuple[str, ...] = get_args(OnHang)
PROFILES = ("local", "ssh", "slurm", "mpi", "kubernetes", "sky")

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """How a pool is started."""

    profile: str = "local"
    """Where the engines run; "local" is this machine. Else "ssh", "slurm", "mpi", "kubernetes",
    "sky", or the name of a table in gpupool.toml: see docs/guides/clusters.md."""
    n: int | None = None
    """Number of ranks; None: one per GPU, or 2 on a machine without.

    Ranks beyond the GPUs are there, without a GPU, and take no part in training."""
    hosts: tuple[str, ...] = ()
    """HOST or HOST:RANKS, where the cluster does not say them itself; of "kubernetes" and "sky",
    how many."""
    words: tuple[str, ...] = ()
    """What goes to the scheduler as it is, such as ("-p", "gpu")."""
    gpus: tuple[str, ...] | None = None
    """GPUs of this machine to use: indices as of `nvidia-smi`, UUIDs, or MIG instances such as
    "0:1"; None: all visible ones."""
    device: Device = "auto"
    """"auto" takes GPUs if there are any, "gpu" insists on them, "cpu" leaves them alone."""
    backend: Backend = "auto"
    """"auto": NCCL among ranks that have a GPU each, gloo as soon as one without takes part.

    Ranks with MIG instances of one GPU are joined by gloo."""
    force: bool = False
    """Take GPUs that another pool has locked, or another user computes on, too."""
    env: tuple[str, ...] = ()
    """Names or globs of environment variables that every rank gets."""
    idle_timeout: str | float | None = "30m"
    """Stop the pool after this time without use: "90s", "30m", "2h", "never", or seconds."""
    timeout_s: float = 60.0
    """Give up starting after this many seconds; those in which a scheduler has no hosts yet do not
    count."""
    on_hang: OnHang = "tell"
    """What happens when the ranks wait for each other and none gets on: "tell" says where each one
    is, below the running cell; "abort" ends the cell as well, with that as its error. Where a rank
    may still come to the others, because it sleeps or computes, that is said and nothing ends."""
    hang_after_s: float = 30.0
    """Seconds without progress after which ranks in a collective count as hanging; inf: never."""

    def __post_init__(self) -> None:
        if not isinstance(self.profile, str) or not self.profile:
            one_of("profile", self.profile, PROFILES)
        for name in ("hosts", "words") if self.profile == "local" else ("gpus",):
            if value := getattr(self, name):
                raise OptionsError(
                    f"{name}={value!r} says nothing to {self.profile!r}: leave it out."
                )
        one_of("device", self.device, DEVICES)
        one_of("backend", self.backend, BACKENDS)
        one_of("on_hang", self.on_hang, ON_HANG)
        if self.n is not None:
            number("n", self.n, whole=True)
        number("timeout_s", self.timeout_s)
        number("hang_after_s", self.hang_after_s)
        if self.n is not None and self.n < 1:
            raise OptionsError.of("n", self.n, "a pool needs at least one rank.")
        # After `number`: a string compared with 0 would raise Python's TypeError.
        for name in ("timeout_s", "hang_after_s"):
            if not getattr(self, name) > 0:  # also true of nan
                raise OptionsError.of(name, getattr(self, name), "must be above 0 seconds.")
        of_gpus = {"gpus": self.gpus, "force": self.force, "backend": self.backend == "nccl"}
        for name, is_given in of_gpus.items():
            if self.device == "cpu" and is_given:
                raise OptionsError(
                    f"device='cpu' and {name}={getattr(self, name)!r} exclude each other; leave "
                    "one of them out."
                )
        parse_duration_s(self.idle_timeout)

    @property
    def idle_timeout_s(self) -> float | None:
        """`idle_timeout` in seconds; None for never."""
        return parse_duration_s(self.idle_timeout)


def make_options(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """`cls(**values)`, with unknown names answered by the right one.

    Raises:
        OptionsError: an unknown name, or a value that the class refuses.
    """
    refuse_unknown(values, [field.name for field in fields(cls)])  # type: ignore[arg-type]
    return cls(**values)


def refuse_unknown(
    names: Iterable[str],
    known: Sequence[str],
    others: Mapping[str, str] | None = None,
    where: str = "",
    of: str = "",
) -> None:
    """Raise OptionsError for the first name that is no option, with what was meant.

    Args:
        others: another name -> the one of `known` that is meant.
        where: where all options are shown; they are listed unless given.
        of: whose options they are, as " of a cluster".
    """
    for name in names:
        if name not in known:
            meant = other_names.meant(name, known, others or {})
            answer = f"Did you mean {meant!r}?" if meant else where
            answer = answer or f"There are: {', '.join(known)}."
            raise OptionsError(f"{name!r} is not an option{of}. {answer}")


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known word, or lists them all."""
    known = list(known)
    close = other_names.meant(name, known, {})
    return f"Did you mean {close!r}?" if close else f"There are: {', '.join(known)}."


def parse_duration_s(value: str | float | None) -> float | None:
    """Seconds of "90s", "30m", "2h", "1d" or a plain number; None for "never" and None.

    >>> parse_duration_s("30m"), parse_duration_s("never"), parse_duration_s(5)
    (1800.0, None, 5.0)
    """
    if value is None or value == "never":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(value))
    if not match or float(match[1]) <= 0:
        raise OptionsError(f"{value!r} is not a time. Write '90s', '30m', '2h' or 'never'.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def seconds_argument(text: str) -> float:
    """The type of an argument that is a number of seconds, for `argparse`."""
    import argparse  # who parses arguments has it; `import gpupool` does not

    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


seconds_argument.__name__ = "number of seconds"  # argparse names the type in its errors


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks of "all", "0", "0,2", "0:4", "::2" or "-1" of `world_size` ranks, sorted, each once.

    >>> parse_ranks("0:2,-1", 4), parse_ranks("1::2", 4)
    ((0, 1, 3), (1, 3))
    """
    ranks: set[int] = set()
    for part in text.split(","):
        try:
            ranks.update(_parse_part(part.strip(), world_size))
        except (ValueError, IndexError):
            raise OptionsError(
                f"ranks {text!r}: write all, 0, 0,2, 0:4, ::2 or -1; this pool has "
                f"ranks 0 to {world_size - 1}."
            ) from None
    return tuple(sorted(ranks))


def _parse_part(part: str, world_size: int) -> Iterable[int]:
    every = range(world_size)
    if part == "all":
        return every
    if ":" in part:
        chosen = every[slice(*(int(p) if p else None for p in part.split(":", 2)))]
        # Python gives an empty range for a slice beyond the ranks; here it is a mistake.
        if not chosen:
            raise IndexError(part)
        return chosen
    # A range takes negative indices, so -1 is the last rank.
    return [every[int(part)]]


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise OptionsError if `value` is none of the words `allowed`."""
    if value not in allowed:
        raise OptionsError(f"{name}={value!r} is unknown: choose one of {', '.join(allowed)}.")


def number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise OptionsError if `value` is no (whole) number; True and False are none."""
    # numpy registers its scalars with `numbers`, so they pass; its bool is not registered.
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise OptionsError(f"{name}={value!r}: must be a number.")
    if whole and not isinstance(value, numbers.Integral):  # 2.0 is no number of steps to Python
        raise OptionsError(f"{name}={value}: must be a whole number.")


def folder_url(name: str, value: object) -> str:
    """The URL or path of a folder as text. Raises OptionsError if `value` is none."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip():
        shown = without_passwords(repr(value))
        raise OptionsError(f"{name}={shown}: must be a folder, as 's3://bucket/run1'.")
    refuse_typo(path, name)
    return path
