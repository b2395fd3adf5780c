"""What `TrainingOptions` come to with a model, data and ranks, before training. Runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpupool.core import current, plan_words
from gpupool.core.datasets import num_samples
from gpupool.core.errors import OptionsError
from gpupool.core.execution import Execution, choose_execution
from gpupool.core.model_facts import ModelFacts
from gpupool.core.schedule import lr_factor, total_steps, warmup_steps
from gpupool.core.shares import share_sizes
from gpupool.core.topology import Rank, place, training_ranks

if TYPE_CHECKING:
    from gpupool.core.training_options import TrainingOptions

MAX_POINTS = 200
_NO_POOL = "No pool runs: this is for one rank. Start one, or say how many: explain(..., pool=4)."


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does: its `share` of a whole batch, in samples, or why it has none."""

    rank: int
    device: str
    share: int
    why_idle: str = ""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The effective plan of a training; its text is `str(plan)`, and a notebook draws it.

    `options` are the resolved ones, `before` those that were given. What is not known without a
    model or data is None: `num_samples` of a stream, too. `learning_rates` are (step, rate) at up
    to 200 steps, the first and the last among them.
    """

    options: TrainingOptions
    before: TrainingOptions
    ranks: tuple[RankPlan, ...]
    num_training: int
    backend: str
    is_stream: bool
    num_samples: int | None
    num_validation: int | None
    has_validation: bool | None
    steps_per_epoch: int | None
    num_steps: int | None
    warmup_steps: int | None
    learning_rates: tuple[tuple[int, float], ...]
    model: ModelFacts | None
    notes: tuple[str, ...] = ()

    @property
    def last_batch(self) -> int | None:
        """Samples in the last batch of an epoch."""
        if not self.num_samples:
            return None
        return self.num_samples % self.options.batch_size or self.options.batch_size

    @property
    def scaled(self) -> tuple[tuple[str, float, float], ...]:
        """(option, before, after) of each number that the number of ranks has changed."""
        pairs = (
            (name, getattr(self.before, name), getattr(self.options, name)) for name in _SCALED
        )
        return tuple(pair for pair in pairs if pair[1] != pair[2])

    @property
    def reduced_bytes(self) -> int | None:
        """Bytes of gradients that are summed over the ranks in a step; 0 for one rank."""
        if self.num_training == 1:
            return 0
        if self.model is None:
            return None
        halved = self.options.compress != "none"
        return 2 * self.model.num_trainable if halved else self.model.trainable_bytes

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate is the same in every step."""
        return len({rate for _, rate in self.learning_rates}) <= 1

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The plan in words: (title, [(what, value), ...])."""
        return plan_words.sections(self)

    def __str__(self) -> str:
        return plan_words.text(self)

    __repr__ = __str__


_SCALED = ("batch_size", "lr")


def make_plan(
    options: TrainingOptions, model: Any, dataset: Any, validation: Any, pool: Any
) -> TrainingPlan:
    """What `TrainingOptions.explain` returns.

    Raises:
        OptionsError: `train` would refuse the options.
    """
    pool = current.find_pool() if pool is None else pool
    ranks = _ranks_of(pool)
    training = getattr(pool, "training_ranks", None) or training_ranks(ranks)
    why_cpu = getattr(pool, "why_cpu", "")
    execution = choose_execution(options.execution, ranks, training, why_cpu)
    resolved = options.resolve(len(execution.ranks))
    samples = None if dataset is None else num_samples(dataset)
    is_stream = dataset is not None and samples is None
    facts = None if model is None else ModelFacts.of(model, resolved)
    knows_validation = dataset is not None or validation is not None
    resolved.check_for(
        has_validation=validation is not None or not knows_validation,
        num_ranks=len(execution.ranks),
        num_samples=samples,
        is_stream=is_stream,
        model=facts,
    )
    per_epoch = -(-samples // resolved.batch_size) if samples else None
    return TrainingPlan(
        options=resolved,
        before=options,
        ranks=_rank_plans(resolved, ranks, execution),
        num_training=len(execution.ranks),
        backend=_backend(pool, execution),
        is_stream=is_stream,
        num_samples=samples,
        num_validation=None if validation is None else num_samples(validation),
        has_validation=validation is not None if knows_validation else None,
        steps_per_epoch=per_epoch,
        num_steps=total_steps(resolved, per_epoch or 0),
        warmup_steps=warmup_steps(resolved, per_epoch) if per_epoch else None,
        learning_rates=learning_rates(resolved, per_epoch) if per_epoch else (),
        model=facts,
        notes=(_NO_POOL,) if pool is None else (),
    )


def learning_rates(options: TrainingOptions, steps_per_epoch: int) -> tuple[tuple[int, float], ...]:
    """(step, learning rate) at up to `MAX_POINTS` steps of a training, first and last included."""
    total = total_steps(options, steps_per_epoch) or 1
    num = min(total, MAX_POINTS)
    steps = [1 + round(i * (total - 1) / max(1, num - 1)) for i in range(num)]
    return tuple((step, options.lr * lr_factor(options, step, steps_per_epoch)) for step in steps)


def _ranks_of(pool: Any) -> Sequence[Rank]:
    """The ranks of a pool; of None one, of a number so many, on CPU."""
    if pool is None or (isinstance(pool, int) and not isinstance(pool, bool)):
        num = 1 if pool is None else pool
        if num < 1:
            raise OptionsError(f"pool={num}: a pool has at least one rank.")
        return place([], num, num_cores=num)
    if not hasattr(pool, "ranks"):
        raise OptionsError(f"pool={pool!r}: give a gpupool.Pool or a number of ranks.")
    ranks: Sequence[Rank] = pool.ranks
    return ranks


def _rank_plans(
    options: TrainingOptions, ranks: Sequence[Rank], execution: Execution
) -> tuple[RankPlan, ...]:
    load = options.rank_load or [1.0] * len(execution.ranks)
    num_parts = options.accumulate if options.batch_norm == "sync" else 1  # as the ranks cut it
    sizes = share_sizes(options.batch_size, load, num_parts)
    share_of = dict(zip(execution.ranks, sizes, strict=True))
    load_of = dict(zip(execution.ranks, load, strict=True))
    plans = []
    for rank in ranks:
        trains = rank.rank in share_of
        why = execution.idle.get(rank.rank, "")
        if trains and not load_of[rank.rank]:
            why = "its rank_load is 0"
        elif trains and not share_of[rank.rank]:
            why = "a batch has fewer samples than there are ranks"
        on_gpu = rank.gpu is not None and (execution.on_gpu or not trains)
        device = f"GPU {rank.gpu.label}: {rank.gpu.name}" if on_gpu and rank.gpu else "CPU"
        plans.append(RankPlan(rank.rank, device, share_of.get(rank.rank, 0), why))
    return tuple(plans)


def _backend(pool: Any, execution: Execution) -> str:
    """What carries the gradients; "" where there is nothing to carry."""
    if len(execution.ranks) == 1:
        return ""
    if not execution.on_gpu:
        return "gloo"
    return str(getattr(pool, "training_backend", "gloo"))
