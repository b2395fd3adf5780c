"""The best validation so far, patience, and divergence: from numbers alone. Runs anywhere.

Every rank has the same numbers, sums over all ranks, and so decides the same.

Divergence is one of three things:

- "not finite": the loss is NaN or infinite.
- "spike": three steps in a row, the loss is above its median over the last 50 steps by more than
  ten times its spread there (1.4826 times the median absolute deviation, which is the standard
  deviation of what is distributed normally), and above twice the median, of fewer than 20 steps
  above ten times. A learning rate that doubles from one step to the next, as a warm restart's,
  clears the window: what comes then is no jump.
- "chance": over the last 30 steps the accuracy is that of guessing, at most 1.2 times 1 / classes,
  although it was at least twice that before, by more than luck explains (five standard deviations
  of that many right ones, if each is rare: Poisson), or although the loss does not fall from above
  1.5 times that of giving each class the same probability, ln(classes).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median_low
from typing import Any

from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import StepEvent, WarningEvent

_WINDOW = 50  # steps whose losses are looked at
_LEAST, _FEW = 2, 20  # of them, before anything is called a spike; and before the median is sure
_IN_A_ROW = 3
_TIMES, _TIMES_OF_FEW = 2.0, 10.0
_SPREADS = 10.0
_RESTART = 2.0  # times the learning rate before
_NORMAL = 1.4826  # standard deviation over median absolute deviation
_RECENT = 30  # steps whose accuracies are looked at
_AT_CHANCE, _ABOVE_CHANCE, _WORSE_THAN_GUESSING = 1.2, 2.0, 1.5
_LUCK = 5.0  # standard deviations


class EarlyStopping:
    """Follows validations and steps, one after the other.

    Args:
        objective: of the values of a validation, the one that counts.
        patience: it is over when so many validations in a row were not better; None: never.
        min_delta: by how much one has to be better than the last that was, for patience.
    """

    def __init__(
        self, objective: str = "loss", patience: int | None = None, min_delta: float = 0.0
    ) -> None:
        self.objective, self._patience, self._min_delta = objective, patience, min_delta
        self.best: dict[str, float] = {}
        """The values of the best validation; {} before the first that is no NaN."""
        self.best_step = -1
        self._counted = math.nan  # the objective of the last validation that was enough better
        self._num_worse = 0
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # accuracy, loss
        self._lr = 0.0
        self._best_accuracy = 0.0
        self._num_high = 0
        self._warned: set[str] = set()

    def add_validation(self, step: int, values: Mapping[str, float]) -> bool:
        """Add the values of a validation; whether they are the best so far."""
        new, old = values[self.objective], self.best.get(self.objective, math.nan)
        # Small steps that are each too small for patience add up: they count together.
        if self._is_better(new, self._counted, self._min_delta):
            self._counted, self._num_worse = new, 0
        else:
            self._num_worse += 1
        if not self._is_better(new, old):
            return False
        self.best, self.best_step = dict(values), step
        return True

    def _is_better(self, new: float, old: float, by: float = 0.0) -> bool:
        if math.isnan(new) or math.isnan(old):  # NaN is never better, any number is than NaN
            return not math.isnan(new)
        return new < old - by if less_is_better(self.objective) else new > old + by

    @property
    def is_patience_over(self) -> bool:
        """Whether the last `patience` validations were not better."""
        return self._patience is not None and self._num_worse >= self._patience

    @property
    def is_finite(self) -> bool:
        """Whether no loss was NaN or infinite yet."""
        return "not finite" not in self._warned

    def add_steps(self, steps: Sequence[StepEvent], num_classes: int = 0) -> list[WarningEvent]:
        """The warnings after the next steps that counted something; each comes once."""
        found = self._not_finite(steps)
        # A NaN would stay in the window of the medians for 50 steps.
        found += self._spike([one for one in steps if math.isfinite(one.loss)])
        if num_classes > 1:
            found += self._chance(steps, num_classes)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; its keys are the file's format."""
        return {
            "best": dict(self.best),
            "best_step": self.best_step,
            "num_worse": self._num_worse,
            "counted": self._counted,
            "losses": list(self._losses),
            "recent": list(self._recent),
            "lr": self._lr,
            "best_accuracy": self._best_accuracy,
            "num_high": self._num_high,
            "told": sorted(self._warned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another one; what it found best counts only by the same objective."""
        # With another objective, the best so far and its patience mean nothing.
        if self.objective in state["best"] or not state["best"]:
            self.best, self.best_step = dict(state["best"]), state["best_step"]
            self._num_worse = state["num_worse"]
            self._counted = state["counted"]
        self._losses.extend(state["losses"])
        self._recent.extend(state["recent"])
        self._lr = state["lr"]
        self._best_accuracy, self._num_high = state["best_accuracy"], state["num_high"]
        self._warned = set(state["told"])

    def warn_of_weights(self, step: int) -> WarningEvent:
        """The warning where weights are NaN or infinite, which the loss did not show yet."""
        self._warned.add("not finite")
        return WarningEvent(
            "not finite",
            f"Weights became NaN or infinite by step {step}: training diverged. {_LOWER}.",
            step,
        )

    def _not_finite(self, steps: Sequence[StepEvent]) -> list[WarningEvent]:
        for one in steps:
            if not math.isfinite(one.loss) and self.is_finite:
                self._warned.add("not finite")
                became = "NaN" if math.isnan(one.loss) else "infinite"
                said = f"Loss became {became} at step {one.step}: training diverged. {_LOWER}."
                return [WarningEvent("not finite", said, one.step)]
        return []

    def _spike(self, steps: Sequence[StepEvent]) -> list[WarningEvent]:
        found = []
        for one in steps:
            if one.lr > _RESTART * self._lr:
                self._losses.clear()
                self._num_high = 0
            self._lr = one.lr
            usual = self._exceeded(one.loss)
            self._num_high = 0 if usual is None else self._num_high + 1
            if self._num_high == _IN_A_ROW and "spike" not in self._warned:
                self._warned.add("spike")
                said = f"Loss jumped from about {usual:.3g} to {one.loss:.3g}"
                found.append(WarningEvent("spike", f"{said} before step {one.step}.", one.step))
            self._losses.append(one.loss)
        return found

    def _exceeded(self, loss: float) -> float | None:
        """What the loss was so far, if it is high now."""
        num = len(self._losses)
        if num < _LEAST:
            return None
        # Medians, as a single jump would move a mean, and hide the next one.
        middle = median_low(self._losses)
        if loss <= middle * (_TIMES if num >= _FEW else _TIMES_OF_FEW):  # mostly so: it is cheap
            return None
        spread = _NORMAL * median_low(abs(one - middle) for one in self._losses)
        return middle if loss > middle + _SPREADS * spread else None

    def _chance(self, steps: Sequence[StepEvent], num_classes: int) -> list[WarningEvent]:
        guessing = 1 / num_classes
        for one in steps:
            if one.accuracy is None:
                continue
            self._recent.append((one.accuracy, one.loss))
            if len(self._recent) < _RECENT or "chance" in self._warned:
                continue
            accuracies, losses = zip(*self._recent, strict=True)
            recent = fmean(accuracies)
            best = self._best_accuracy = max(self._best_accuracy, recent)
            if recent > _AT_CHANCE * guessing:
                continue
            num = _RECENT * one.num_samples
            # How many are right varies by luck, with the root of their number.
            was_better = best >= _ABOVE_CHANCE * guessing and (
                (best - recent) * num > _LUCK * math.sqrt(best * num)
            )
            if was_better or _is_bad(losses, _WORSE_THAN_GUESSING * math.log(num_classes)):
                self._warned.add("chance")
                was = f", after {best:.1%}" if was_better else ""
                said = (
                    f"Accuracy is no better than chance ({num_classes} classes): "
                    f"{recent:.1%} over {_RECENT} steps{was}. "
                    f"{_LOWER if was_better else _NOTHING.format(fmean(losses))}."
                )
                return [WarningEvent("chance", said, one.step)]
        return []


def _is_bad(losses: Sequence[float], limit: float) -> bool:
    """Whether losses are above a limit, and do not fall."""
    half = len(losses) // 2
    earlier, later = fmean(losses[:half]), fmean(losses[half:])
    return later > limit and later >= earlier


_NOTHING = (
    "Nothing is learnt, and the loss does not fall from {:.3g}. Check labels and normalization, "
    "and try another lr"
)
_LOWER = "Try a smaller lr, warmup= or clip="
