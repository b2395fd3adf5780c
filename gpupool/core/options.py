"""What a user can choose, as frozen dataclasses that are validated once. Runs anywhere.

Magics and views read names and defaults from here and repeat none. A wrong value raises
`OptionsError` with the value, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from gpupool.core.errors import OptionsError

DEVICES = ("auto", "cpu", "gpu")
BACKENDS = ("auto", "nccl", "gloo")
ON_HANG = ("tell", "abort")
PROFILES = ("local",)
OPTIMIZERS = ("sgdm", "adam", "adamw", "rmsprop")
LOSSES = ("cross_entropy", "mse")
ON_ERROR = ("raise", "skip")
SHUFFLES = ("every-epoch", "once", "never")

MAX_SKIPPED = 0.001  # of the samples of an epoch

# The same things under the names of MATLAB's trainingOptions, for a better error.
MATLAB_NAMES = {
    "InitialLearnRate": "lr",
    "MiniBatchSize": "batch_size",
    "MaxEpochs": "epochs",
    "L2Regularization": "weight_decay",
    "Momentum": "momentum",
    "Shuffle": "shuffle",
    "VerboseFrequency": "log_every",
}

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """How a pool is started."""

    profile: str = "local"
    """Where the engines run; "local" is this machine."""
    n: int | None = None
    """Number of ranks; None: one per GPU, or 2 on a machine without.

    Ranks beyond the GPUs are there, without a GPU, and take no part in training."""
    gpus: tuple[str, ...] | None = None
    """GPUs to use: indices, UUIDs, or MIG instances such as "0:1"; None: all visible ones."""
    device: str = "auto"
    """"auto" takes GPUs if there are any, "gpu" insists on them, "cpu" leaves them alone."""
    backend: str = "auto"
    """"auto": NCCL among ranks that have a GPU each, gloo as soon as one without takes part."""
    force: bool = False
    """Take GPUs that another pool has locked, too."""
    env: tuple[str, ...] = ()
    """Names or globs of environment variables that every rank gets."""
    idle_timeout: str | float | None = "30m"
    """Stop the pool after this time without use: "90s", "30m", "2h", "never", or seconds."""
    timeout_s: float = 60.0
    """Give up starting after this many seconds."""
    on_hang: str = "tell"
    """What happens when the ranks wait for each other and none gets on: "tell" says where each one
    is, below the running cell; "abort" ends the cell as well, with that as its error. Where a rank
    may still come to the others, because it sleeps or computes, that is told and nothing ends."""
    hang_after_s: float = 30.0
    """Seconds without progress after which ranks in a collective count as hanging; inf: never."""
    inline: bool = False
    """No engines: this process itself is rank 0 of 1, so that breakpoints work."""

    def __post_init__(self) -> None:
        _one_of("profile", self.profile, PROFILES)
        _one_of("device", self.device, DEVICES)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("on_hang", self.on_hang, ON_HANG)
        if self.n is not None:
            _number("n", self.n, whole=True)
        _number("timeout_s", self.timeout_s)
        _number("hang_after_s", self.hang_after_s)
        if self.n is not None and self.n < 1:
            raise OptionsError(f"n={self.n}: a pool needs at least one rank.")
        for name in ("timeout_s", "hang_after_s"):
            if not getattr(self, name) > 0:  # also true of nan
                raise OptionsError(f"{name}={getattr(self, name)}: must be above 0 seconds.")
        if self.device == "cpu" and self.gpus:
            raise OptionsError("device='cpu' and gpus= exclude each other; leave one of them out.")
        if self.device == "cpu" and self.force:
            raise OptionsError(
                "device='cpu' and force exclude each other: there is no GPU to take."
            )
        if self.device == "cpu" and self.backend == "nccl":
            raise OptionsError("backend='nccl' needs GPUs; on CPU ranks use 'gloo' or 'auto'.")
        parse_duration_s(self.idle_timeout)
        if self.inline:
            self._check_inline()

    def _check_inline(self) -> None:
        """What an inline pool cannot do, or what would have no effect."""
        if self.n not in (None, 1):
            raise OptionsError(
                f"n={self.n}: an inline pool is this process alone, one rank. Leave n out."
            )
        if self.gpus is not None and len(self.gpus) != 1:
            raise OptionsError(f"gpus={','.join(self.gpus)}: an inline pool uses one GPU; name it.")
        # An idle timeout frees GPUs that are held for nobody; this process is the user's.
        # Its one rank waits for no other.
        without_effect: dict[str, tuple[object, ...]] = {
            "idle_timeout": ("30m", "never", None),
            "timeout_s": (60.0,),
            "on_hang": ("tell",),
            "hang_after_s": (30.0,),
        }
        for name, quiet in without_effect.items():
            value = getattr(self, name)
            if value not in quiet:
                raise OptionsError(
                    f"{name}={value!r} has no effect on an inline pool, which starts no processes: "
                    "leave it out."
                )

    @property
    def idle_timeout_s(self) -> float | None:
        """`idle_timeout` in seconds; None for never."""
        return parse_duration_s(self.idle_timeout)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How a network is trained.

    `batch_size` is global: the samples of one optimizer step over all ranks. Each rank computes its
    share, and the result is that of one process with the whole batch.
    """

    optimizer: str = "sgdm"
    """"sgdm" (SGD with momentum), "adam", "adamw" or "rmsprop", as in `torch.optim`."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float | None = None
    """Of "sgdm" (0.9 unless given) and "rmsprop" (0 unless given)."""
    weight_decay: float = 0.0
    """L2 factor; decoupled for "adamw", added to the gradient otherwise, as in `torch.optim`."""
    epochs: int = 10
    """Passes over the data."""
    batch_size: int = 128
    """Samples per optimizer step over all ranks; the last batch of an epoch may be smaller."""
    shuffle: str = "every-epoch"
    """"every-epoch", "once" (the same order each epoch) or "never"."""
    seed: int = 0
    """Fixes the order of the samples and the random numbers of each rank (seed + rank)."""
    learn_rate_factors: Mapping[str, float] = field(default_factory=dict)
    """Glob on parameter names -> factor on `lr`; 0 freezes. The last matching pattern counts."""
    log_every: int = 10
    """Steps between two reports; each report carries every step since the last."""
    on_error: str = "raise"
    """What happens when a sample cannot be read: "raise" ends training with an error that names it;
    "skip" leaves it out, counts it nowhere and lists it in `TrainingResult.skipped`. A data set of
    one's own raises `gpupool.SampleError` for such a sample."""
    max_skipped: float | None = None
    """Of on_error="skip": the share of an epoch's samples that may be left out before that is an
    error after all (0.001 unless given; one image always may, with all patches of it)."""

    def __post_init__(self) -> None:
        _one_of("on_error", self.on_error, ON_ERROR)
        self._check_skipping()
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("shuffle", self.shuffle, SHUFFLES)
        for name in ("epochs", "batch_size", "log_every", "seed"):
            value = getattr(self, name)
            _number(name, value, whole=True)
            object.__setattr__(self, name, int(value))  # numpy's would overflow
        for name in ("lr", "weight_decay"):
            _number(name, getattr(self, name))
        if self.momentum is not None:
            _number("momentum", self.momentum)
        for name in ("lr", "epochs", "batch_size", "log_every"):
            if not getattr(self, name) > 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must be above 0.")
        if not 0 <= self.seed < 2**64:
            raise OptionsError(f"seed={self.seed}: must be in 0..2**64-1.")
        if self.weight_decay < 0:
            raise OptionsError(f"weight_decay={self.weight_decay}: must not be negative.")
        if self.momentum is not None and self.optimizer not in ("sgdm", "rmsprop"):
            raise OptionsError(
                f"momentum={self.momentum} does nothing with optimizer={self.optimizer!r}: "
                "leave it out, or choose optimizer='sgdm'."
            )
        bad = {k: v for k, v in self.learn_rate_factors.items() if v < 0}
        if bad:
            raise OptionsError(f"learn_rate_factors={bad}: a factor must not be negative.")

    def _check_skipping(self) -> None:
        if self.max_skipped is None:
            return
        _number("max_skipped", self.max_skipped)
        if not 0 < self.max_skipped <= 1:
            raise OptionsError(
                f"max_skipped={self.max_skipped}: must be a share of the samples, above 0 and at "
                "most 1."
            )
        if self.on_error != "skip":
            raise OptionsError(
                f"max_skipped={self.max_skipped} does nothing with on_error={self.on_error!r}: "
                "leave it out, or choose on_error='skip'."
            )

    def most_skipped(self, num_samples: int) -> int:
        """How many of `num_samples` may be left out in an epoch; those of one image always may."""
        if self.on_error != "skip":
            return 0
        share = MAX_SKIPPED if self.max_skipped is None else self.max_skipped
        return max(1, int(share * num_samples + 1e-9))


def make_options(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """`cls(**values)`, with unknown names answered by the right one.

    Raises:
        OptionsError: an unknown name, or a value that the class refuses.
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise OptionsError(f"{name!r} is not an option. {suggest(name, known)}")
    return cls(**values)


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known word, or lists them all."""
    known = list(known)
    close = MATLAB_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), None)
    if close in known:
        return f"Did you mean {close!r}?"
    return f"There are: {', '.join(known)}."


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


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks of "all", "0", "0,2", "0:4" or "-1" in a pool of `world_size`, sorted, each once.

    >>> parse_ranks("0:2,-1", 4)
    (0, 1, 3)
    """
    ranks: set[int] = set()
    for part in text.split(","):
        try:
            ranks.update(_parse_part(part.strip(), world_size))
        except (ValueError, IndexError):
            raise OptionsError(
                f"ranks {text!r}: write all, 0, 0,2, 0:4 or -1; this pool has ranks "
                f"0 to {world_size - 1}."
            ) from None
    return tuple(sorted(ranks))


def _parse_part(part: str, world_size: int) -> Iterable[int]:
    every = range(world_size)
    if part == "all":
        return every
    if ":" in part:
        start, stop = (int(p) if p else None for p in part.split(":"))
        chosen = every[slice(start, stop)]
        if not chosen:
            raise IndexError(part)
        return chosen
    return [every[int(part)]]


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionsError(f"{name}={value!r} is unknown: choose one of {', '.join(allowed)}.")


def _number(name: str, value: object, *, whole: bool = False) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise OptionsError(f"{name}={value!r}: must be a number.")
    if whole and not isinstance(value, numbers.Integral):  # 2.0 is no number of steps to Python
        raise OptionsError(f"{name}={value}: must be a whole number.")
