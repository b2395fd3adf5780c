"""The learning rate of every step in closed form. Pure; runs anywhere.

There is no state: a step's factor follows from its number alone, so a training that is resumed
needs none. Each schedule is that of `torch.optim.lr_scheduler` with `.step()` after every optimizer
step; what they are called there stands beside each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import warmup_of
from gpupool.core.options.fields import TrainingFields

WARMUP_FACTOR = 0.1
DROP_FACTOR = 0.1
CYCLE_PERIOD = 2  # epochs
LOWEST_OF_CYCLE = 0.1


def lr_factor(
    options: TrainingFields, step: int, steps_per_epoch: int, epoch: int | None = None
) -> float:
    """The factor on `lr` of a step.

    Args:
        options: resolved ones.
        step: counts from 1 over all epochs.
        steps_per_epoch: 0 where nobody knows.
        epoch: from 1; computed from `step` if left out.

    Raises:
        OptionsError: the schedule needs the number of steps in an epoch.
    """
    # torch's schedulers count the steps that are done, and ours count from 1.
    done = step - 1
    warmup = warmup_steps(options, steps_per_epoch)
    if done < warmup:  # LinearLR
        first = WARMUP_FACTOR if options.warmup_factor is None else options.warmup_factor
        return first + (1 - first) * done / warmup
    if epoch is None:
        epoch = 1 + done // steps_per_epoch if steps_per_epoch else 1
    if callable(options.schedule):
        return float(options.schedule(step, epoch))
    piece = _piece(options, epoch)
    if piece.name == "none":
        return 1.0
    # It counts epochs, not steps after the warm-up, so drops stay at the borders of epochs.
    if piece.name == "piecewise":  # StepLR, once an epoch
        return _drop_factor(options) ** ((epoch - 1 - piece.first_epoch) // piece.drop_period)
    # All other schedules begin after the warm-up, else the rate would jump where that ends.
    begin = max(piece.first_epoch * steps_per_epoch, warmup)
    if piece.name in ("polynomial", "cosine"):
        length = _end(options, piece, steps_per_epoch) - begin
        return _falling(options, piece, done - begin, length, steps_per_epoch)
    _require_known(options, steps_per_epoch)
    if piece.name == "exponential":  # ExponentialLR
        return float(
            _drop_factor(options) ** ((done - begin) / (piece.drop_period * steps_per_epoch))
        )
    return _triangle(options, done - begin, steps_per_epoch)


def turns(options: TrainingFields, steps_per_epoch: int) -> tuple[tuple[int, float], ...]:
    """The steps at which the learning rate turns: pairs (step, factor on `lr`), in order.

    The end of a warm-up; each drop of "piecewise"; the last step of what falls all the time; the
    first of what follows it. Nothing of a callable, of triangles and restarts, whose next value
    says little, nor where nobody knows how many steps an epoch has.

    Args:
        options: resolved ones.
    """
    if callable(options.schedule) or not steps_per_epoch:
        return ()
    total = total_steps(options, steps_per_epoch) or 0
    warm = 1 + warmup_steps(options, steps_per_epoch)
    # Computed from the schedule, not found by asking each step: a training may have millions.
    places = {warm}
    for piece in _pieces(options):
        if piece.name == "cyclical" or (piece.name == "cosine" and options.cycle_period):
            return ()
        first = 1 + piece.first_epoch * steps_per_epoch
        last = (piece.first_epoch + piece.num_epochs) * steps_per_epoch
        places.add(first)
        if piece.name == "piecewise":
            places.update(range(first, last + 1, piece.drop_period * steps_per_epoch))
        elif piece.name != "none":
            places.add(min(last, total))
    # Step 1 is the start and no turn; within the warm-up no piece decides the rate.
    steps = sorted(step for step in places if max(2, warm) <= step <= total)
    return tuple((step, lr_factor(options, step, steps_per_epoch)) for step in steps)


def check_for_stream(options: TrainingFields) -> None:
    """Raise OptionsError if the schedule needs to know how many steps an epoch has."""
    # The first step after the warm-up, as within it no piece is asked. One step of each epoch is
    # enough: what a piece needs does not depend on the step in it.
    step = 1 + warmup_steps(options, 0)
    if not callable(options.schedule):
        for epoch in range(1, options.epochs + 1):
            lr_factor(options, step, 0, epoch)


def warmup_steps(options: TrainingFields, steps_per_epoch: int) -> int:
    """How many steps the warm-up has; 0 without one."""
    if options.warmup is None:
        return 0
    number, unit = warmup_of(options.warmup)
    if unit == "epoch":
        _require_known(options, steps_per_epoch, f"warmup={options.warmup!r}")
        return number * steps_per_epoch
    return number


def total_steps(options: TrainingFields, steps_per_epoch: int) -> int | None:
    """How many steps training has, if nothing ends it before; None where nobody knows."""
    planned = options.epochs * steps_per_epoch
    if options.max_steps is None:
        return planned or None
    return min(planned, options.max_steps) if planned else options.max_steps


@dataclass(frozen=True, slots=True)
class _Piece:
    """One of the schedules that follow each other; `first_epoch` counts from 0."""

    name: str
    first_epoch: int
    num_epochs: int
    drop_period: int


def _pieces(options: TrainingFields) -> list[_Piece]:
    """The pieces, in order."""
    schedule = options.schedule
    pieces = ((schedule, options.epochs),) if isinstance(schedule, str) else tuple(schedule)  # type: ignore[arg-type]
    found, first = [], 0
    for name, num_epochs in pieces:
        found.append(_Piece(name, first, num_epochs, _drop_period(options, num_epochs)))
        first += num_epochs
    return found


def _piece(options: TrainingFields, epoch: int) -> _Piece:
    """The piece that `epoch` (from 1) is in; the last one never ends."""
    *earlier, last = _pieces(options)
    return next((p for p in earlier if epoch <= p.first_epoch + p.num_epochs), last)


def _drop_period(options: TrainingFields, num_epochs: int) -> int:
    return options.drop_period or max(1, num_epochs // 3)


def _drop_factor(options: TrainingFields) -> float:
    return DROP_FACTOR if options.drop_factor is None else options.drop_factor


def _end(options: TrainingFields, piece: _Piece, steps_per_epoch: int) -> int:
    """The step in which a piece is over."""
    # Of a stream only `max_steps` gives an end, and that is the end of all pieces together.
    total = total_steps(options, steps_per_epoch)
    if not steps_per_epoch and (total is None or piece.num_epochs != options.epochs):
        _require_known(options, steps_per_epoch)
    assert total is not None
    if not steps_per_epoch:
        return total
    return min((piece.first_epoch + piece.num_epochs) * steps_per_epoch, total)


def _falling(
    options: TrainingFields, piece: _Piece, done: int, length: int, steps_per_epoch: int
) -> float:
    """From 1 to the lowest factor, which comes just after the last step."""
    lowest = options.min_factor or 0.0
    if piece.name == "polynomial":  # PolynomialLR
        power = 1.0 if options.power is None else options.power
        # Beyond the end the base would be negative: `math.pow` raises for a power such as 0.5.
        return lowest + (1 - lowest) * math.pow(max(0.0, 1 - done / length), power)
    if options.cycle_period is not None:  # CosineAnnealingWarmRestarts
        _require_known(options, steps_per_epoch)
        length = options.cycle_period * steps_per_epoch
        done %= length
    share = min(1.0, done / length)  # CosineAnnealingLR
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * share)) / 2


def _triangle(options: TrainingFields, done: int, steps_per_epoch: int) -> float:
    """Up and down again in every cycle, beginning below: CyclicLR."""
    lowest = LOWEST_OF_CYCLE if options.min_factor is None else options.min_factor
    length = (options.cycle_period or CYCLE_PERIOD) * steps_per_epoch
    share = done % length / length
    return lowest + (1 - lowest) * (1 - abs(2 * share - 1))


def _require_known(options: TrainingFields, steps_per_epoch: int, what: str = "") -> None:
    if not steps_per_epoch:
        what = what or f"schedule={options.schedule!r}"
        raise OptionsError(
            f"{what} needs the number of steps in an epoch, which a stream, or a "
            "batch_sampler without len(), does not give: give warmup= in steps, max_steps= for "
            "'cosine' and 'polynomial', or a callable schedule.",
            "unknown length",
            what.split("=")[0],
        )
