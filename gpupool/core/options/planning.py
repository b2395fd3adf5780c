"""Makes the plan of a training: what `train` would do, before any rank starts. Runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpupool.core import current
from gpupool.core.errors import OptionsError
from gpupool.core.machine.topology import Rank, place, training_ranks
from gpupool.core.options.datasets import num_samples
from gpupool.core.options.effects import check_for
from gpupool.core.options.fields import TrainingFields
from gpupool.core.options.model_facts import ModelFacts
from gpupool.core.options.plan import RankPlan, TrainingPlan
from gpupool.core.options.sampling import steps_per_epoch, with_data
from gpupool.core.options.schedule import lr_factor, total_steps, warmup_steps
from gpupool.core.options.training_ranks import Execution, choose_execution, share_sizes

MAX_POINTS = 200
_NO_POOL = "No pool runs: this is for one rank. Start one, or say how many: explain(..., pool=4)."


def make_plan(
    options: TrainingFields, model: Any, dataset: Any, validation: Any, pool: Any
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
    if dataset is not None:
        resolved = with_data(resolved, dataset)
    facts = None if model is None else ModelFacts.of(model, resolved)
    # Data alone mean that there is no validation. With neither nobody knows: nothing is refused.
    knows_validation = dataset is not None or validation is not None
    check_for(
        resolved,
        has_validation=validation is not None or not knows_validation,
        num_ranks=len(execution.ranks),
        num_samples=samples,
        is_stream=is_stream,
        model=facts,
    )
    per_epoch = steps_per_epoch(resolved, samples) or None
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
        # 0 stands for an unknown length; only `max_steps` can give a number of steps then.
        num_steps=total_steps(resolved, per_epoch or 0),
        warmup_steps=warmup_steps(resolved, per_epoch) if per_epoch else None,
        learning_rates=learning_rates(resolved, per_epoch) if per_epoch else (),
        model=facts,
        notes=(_NO_POOL,) if pool is None else (),
    )


def learning_rates(options: TrainingFields, steps_per_epoch: int) -> tuple[tuple[int, float], ...]:
    """(step, learning rate) at up to `MAX_POINTS` steps of a training, first and last included."""
    total = total_steps(options, steps_per_epoch) or 1
    num = min(total, MAX_POINTS)
    # The first and the last step are exact, so the curve ends where the training ends.
    steps = [1 + round(i * (total - 1) / max(1, num - 1)) for i in range(num)]
    return tuple((step, options.lr * lr_factor(options, step, steps_per_epoch)) for step in steps)


def _ranks_of(pool: Any) -> Sequence[Rank]:
    """The ranks of a pool; of None one, of a number so many, on CPU."""
    # True is an int to Python, and pool=True would mean one rank.
    if pool is None or (isinstance(pool, int) and not isinstance(pool, bool)):
        num = 1 if pool is None else pool
        if num < 1:
            raise OptionsError.of("pool", num, "a pool has at least one rank.")
        return place([], num, num_cores=num)
    if not hasattr(pool, "ranks"):
        raise OptionsError.of("pool", pool, "give a gpupool.Pool or a number of ranks.", "type")
    ranks: Sequence[Rank] = pool.ranks
    return ranks


def _rank_plans(
    options: TrainingFields, ranks: Sequence[Rank], execution: Execution
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
        # An idle rank keeps its GPU; one that trains on its CPU leaves it alone.
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
