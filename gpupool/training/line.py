"""A training in one line of text, for terminals and logs. Pure; runs on the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpupool.core.figures import done_of
from gpupool.training.reads import many

if TYPE_CHECKING:
    from gpupool.training.history import TrainingHistory

BAR_CHARS = 20
_LEAST = ("step", "rate", "bar", "loss")  # what a narrow terminal does without, in this order


def fitting_line(history: TrainingHistory, width: int) -> str:
    """`status_line` in at most `width` characters: the least of its parts are left out first."""
    left_out = 0
    while len(line := status_line(history, _LEAST[:left_out])) > width and left_out < len(_LEAST):
        left_out += 1
    return line[:width]


def status_line(history: TrainingHistory, without: Sequence[str] = ()) -> str:
    """The state of a training.

    "training  epoch 4/6  step 560/900  [===========>        ] 62%  loss 0.2100  acc 89.9%
    val 89.6%  39.6k img/s  eta 1:10" while it goes on; once it is over the time it took, no bar.

    Args:
        without: parts that are left out, of `_LEAST`.
    """
    if history.start is None or not history.steps:
        if history.status == "failed":
            return f"failed: {history.error}"
        return f"starting: {stage(history)}" if history.stage else history.status
    last, start = history.steps[-1], history.start
    parts = [history.status, f"epoch {last.epoch}/{start.num_epochs}"]
    if "step" not in without:
        parts.append(f"step {last.step}/{history.num_steps or '?'}")
    if history.num_steps and not history.is_over:
        percent = f"{int(100 * history.progress)}%"
        parts.append(percent if "bar" in without else bar(history.progress))
    if "loss" not in without or last.accuracy is None:
        parts.append(f"loss {last.loss:.4f}")
    if last.accuracy is not None:
        parts.append(f"acc {last.accuracy:.1%}")
    if history.validations:
        value = history.validations[-1]
        shown = f"{value.accuracy:.1%}" if value.accuracy is not None else f"{value.loss:.4f}"
        parts.append(f"val {shown}")
    if history.stage:
        parts.append(stage(history))
    if "rate" not in without:
        unit = "img" if start.unit == "images" else "samples"
        parts.append(f"{rate(history.throughput)} {unit}/s")
    eta = None if history.is_over else history.eta_s
    parts.append(f"{history.elapsed_s:.1f} s" if eta is None else f"eta {clock(eta)}")
    parts += history.reads.words()
    if history.warnings:
        parts.append(many(len(history.warnings), "warning"))
    if history.status == "failed":
        parts.append(history.error)
    return "  ".join(parts)


def stage(history: TrainingHistory) -> str:
    """What goes on beside the steps, and how far: "saving the network (12.3 of 98.0 MB)"."""
    aside = history.aside
    if aside is None or not history.stage:
        return ""
    done = done_of(aside.done, aside.total, aside.unit)
    return f"{aside.what} ({done})" if done else aside.what


def bar(share: float) -> str:
    """A share (0..1) as a bar of text.

    >>> bar(0.62), bar(1)
    ('[===========>        ] 62%', '[====================] 100%')
    """
    done = int(BAR_CHARS * share)
    drawn = ("=" * (done - 1) + ">" if done else "") if share < 1 else "=" * BAR_CHARS
    return f"[{drawn:<{BAR_CHARS}}] {int(100 * share)}%"


def rate(a_second: float) -> str:
    """A rate in at most five characters.

    >>> rate(39_600), rate(412.3), rate(2.345)
    ('39.6k', '412', '2.3')
    """
    if a_second >= 10_000:
        return f"{a_second / 1000:.1f}k"
    return f"{a_second:.0f}" if a_second >= 10 else f"{a_second:.1f}"


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock(70), clock(3725)
    ('1:10', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
