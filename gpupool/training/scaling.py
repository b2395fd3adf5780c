"""How much faster more ranks train: the same training on 1, 2, 4 ... of the pool's. Client.

Speed-up on N ranks is X(N) / X(1), efficiency X(N) / (N X(1)), where X is samples a second: of
"weak" scaling the same samples a rank for every N, of "strong" scaling the same batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from gpupool.core.errors import OptionsError
from gpupool.core.formatting import number, percent, rank_count, text_table
from gpupool.core.options import checks
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import progress
from gpupool.core.wire.events import PHASES
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.training.doctor import PHASE_WORDS, WORTH, Shares, in_words
from gpupool.training.history import TrainingHistory
from gpupool.training.run import TrainingRun

if TYPE_CHECKING:
    from torch import nn

FIRST = 11  # steps that set things up, and the report that waits for them: not measured
# What is no part of a step, or would end the training before.
_USUAL = (
    *("checkpoint", "checkpoint_every", "num_checkpoints", "resume", "overwrite", "on_failure"),
    *("profile", "patience", "objective", "metrics", "validate_every", "keep"),
)
COLUMNS = ("ranks", "batch", "samples/s", "speed-up", "efficiency", *PHASES)


@dataclass(frozen=True)
class Size:
    """What was measured on so many ranks: samples a second in each repeat, and mean shares."""

    num_ranks: int
    batch_size: int
    rates: tuple[float, ...]
    shares: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Samples a second: the median of the repeats."""
        return median(self.rates)


@dataclass(frozen=True)
class Scaling:
    """Throughput by the number of ranks; the fewest are what the others are compared with."""

    mode: str
    sizes: tuple[Size, ...]

    def speedup(self, size: Size) -> float:
        """How many times as fast as the fewest ranks."""
        return size.rate / self.sizes[0].rate

    def efficiency(self, size: Size) -> tuple[float, float, float]:
        """Speed-up a rank (1 is ideal), and its lowest and highest over the repeats."""
        ideal = self.sizes[0].rate * size.num_ranks / self.sizes[0].num_ranks
        return size.rate / ideal, min(size.rates) / ideal, max(size.rates) / ideal

    @property
    def sentence(self) -> str:
        """What it comes to: "8 ranks give 6.9 x; from 4 on communication takes 31 %"."""
        fewest, most = self.sizes[0], self.sizes[-1]
        ranks = rank_count(most.num_ranks)
        if fewest is most:
            parts = [f"{ranks}: {number(most.rate)} samples/s", in_words(most.shares)]
            return f"{'; '.join(filter(None, parts))}."
        said = f"{ranks} give {self.speedup(most):.1f} x"
        others = {name: share for name, share in most.shares.items() if name != "compute"}
        name = max(others, key=lambda one: others[one])
        if others[name] < WORTH:
            return f"{said} of {rank_count(fewest.num_ranks)}."
        first = next(size for size in self.sizes if size.shares[name] >= WORTH)
        share = percent(others[name], 0)
        return f"{said}; from {first.num_ranks} on {PHASE_WORDS[name]} takes {share}."

    def table(self) -> list[tuple[str, ...]]:
        """A row for each size: `COLUMNS`."""
        rows = []
        for size in self.sizes:
            counts = map(number, (size.num_ranks, size.batch_size, size.rate))
            speedup = f"{self.speedup(size):.2f}"
            efficiency = "{:.2f} ({:.2f}-{:.2f})".format(*self.efficiency(size))
            shares = (percent(size.shares[name], 0) for name in PHASES)
            rows.append((*counts, speedup, efficiency, *shares))
        return rows

    def __repr__(self) -> str:
        table = text_table([COLUMNS, *self.table()])
        return f"Scaling ({self.mode}): {self.sentence}\n{table}"


def scaling(
    network: nn.Module,
    data: Any,
    options: TrainingOptions | None = None,
    ranks: Sequence[int] | None = None,
    mode: Literal["weak", "strong"] = "weak",
    *,
    loss: Any = "auto",
    steps: int = 30,
    repeats: int = 3,
    pool: Pool | None = None,
) -> Scaling:
    """Train for some steps on 1, 2, 4 ... ranks of the pool in turn, and measure.

    Sizes take turns, so that what else the machine does falls on all. Nothing is validated or
    saved, and `network` is left as it is.

    Args:
        data, loss: as for `train`.
        options: how; `TrainingOptions()` if left out.
        ranks: how many, each at most as many as train in the pool; 1, 2, 4 ... and all if left out.
        mode: "weak": each rank has the share that `batch_size` gives one of the fewest;
            "strong": `batch_size` stays, and each has less.
        steps: of each training; the first 11 are not measured.
        repeats: trainings of each size.
        pool: where; the notebook's pool, which is started if none runs, unless given.

    Raises what `train` raises, and OptionsError where there are too few ranks or steps.
    """
    checks.choose("mode", mode, ("weak", "strong"))
    checks.number(whole=True, least=FIRST + 9)("steps", steps)
    checks.number(whole=True, least=1)("repeats", repeats)
    pool = current_pool(create=True) if pool is None else pool
    sizes = _sizes(ranks, len(pool.training_ranks))
    options = options or TrainingOptions()
    per_rank = options.batch_size / sizes[0]
    batches = {n: round(per_rank * n) if mode == "weak" else options.batch_size for n in sizes}
    found: dict[int, list[TrainingHistory]] = {n: [] for n in sizes}
    with progress("Measuring", len(sizes) * repeats, "trainings") as bar:
        for turn in range(repeats):
            for n in sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]:
                here = _for_measuring(options, data, batches[n], steps)
                run = TrainingRun(pool, network, data, loss, here, None, num_ranks=n)
                found[n].append(run.result().history)
                bar.advance()
    return Scaling(mode, tuple(_measured(n, batches[n], found[n]) for n in sizes))


def _sizes(asked: Sequence[int] | None, most: int) -> list[int]:
    if asked is None:
        return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    check = checks.number(whole=True, least=1, most=most)
    sizes = sorted({int(check("ranks", n)) for n in asked})
    if not sizes:
        raise OptionsError("ranks=(): name at least one number of ranks, as (1, 2).")
    return sizes


def _for_measuring(
    options: TrainingOptions, data: Any, batch_size: int, steps: int
) -> TrainingOptions:
    per_epoch = steps if is_stream(data) else -(-len(data) // batch_size)
    epochs = -(-steps // max(1, per_epoch))
    usual: dict[str, Any] = {name: getattr(TrainingOptions(), name) for name in _USUAL}
    return replace(options, **usual, batch_size=batch_size, epochs=epochs, max_steps=steps)


def _measured(num_ranks: int, batch_size: int, histories: Sequence[TrainingHistory]) -> Size:
    shares = [found for history in histories if (found := Shares.of(history).mean)]
    means = {name: fmean(one[name] for one in shares) if shares else 0.0 for name in PHASES}
    return Size(num_ranks, batch_size, tuple(map(_rate, histories)), means)


def _rate(history: TrainingHistory) -> float:
    """Samples a second of the steps that are measured. They end with the training, which has waited
    for the device: a step in the middle may still be under way there when the host has gone on."""
    if len(history.steps) <= FIRST or history.end is None:
        raise OptionsError(
            f"the data end after {len(history.steps)} steps: scaling needs more than {FIRST}."
        )
    num = sum(step.num_samples for step in history.steps[FIRST:])
    return num / (history.end.elapsed_s - history.steps[FIRST - 1].elapsed_s)
