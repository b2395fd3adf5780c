"""Why a training is slow: a verdict from what its ranks have spent their time on. Pure; client.

The thresholds are those of TraceML 0.5: from 10 % of the time a cause is worth naming, a verdict
needs 20 steps, and a slow rank has to explain 80 % of what the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from gpupool.core.formatting import milliseconds, percent, text_table
from gpupool.core.wire.events import PHASES
from gpupool.training.history import TrainingHistory

PHASE_WORDS = {
    "data": "waiting for data",
    "compute": "computing",
    "exchange": "communication",
    "optimizer": "optimizer",
    "callbacks": "callbacks",
    "validating": "validating",
    "saving": "saving",
    "rest": "the rest",
}
last: TrainingHistory | None = None  # of the training that began last in this notebook
WORTH = 0.10  # of the time: from there on a cause is named
LEAST_SHOWN = 0.005  # of the time: less is nothing in whole percents
LEAST_STEPS = 20
EXPLAINS = 0.8  # of what the others wait: a slow rank's own time has to
SHORT_STEP_S = 0.01  # of so short a step most is the same for any batch
_OWN = ("data", "compute", "optimizer", "callbacks")


@dataclass(frozen=True)
class Shares:
    """What each rank has spent its time on: `by_rank[rank][phase]`, 0..1, of all its time.

    Phases: it waits for its batch ("data"); computes forward and backward ("compute"); waits for
    the gradients of the others and for those on their way ("exchange"); "optimizer"; "callbacks";
    "validating"; "saving"; and the "rest". The first step, which sets things up, is left out.
    """

    by_rank: dict[int, dict[str, float]]

    @classmethod
    def of(cls, history: TrainingHistory) -> Shares:
        """Those of a training so far; ranks no step of which was measured are left out."""
        spent = {rank: event.spent for rank, event in sorted(history.ranks.items())}
        return cls(
            {
                rank: {name: seconds.get(name, 0.0) / sum(seconds.values()) for name in PHASES}
                for rank, seconds in spent.items()
                if seconds.get("compute")
            }
        )

    @property
    def mean(self) -> dict[str, float]:
        """Of all ranks; {} where there is none."""
        ranks = self.by_rank.values()
        return {name: fmean(one[name] for one in ranks) for name in PHASES} if ranks else {}

    def __repr__(self) -> str:
        rows = [
            (str(rank), *(percent(share, 0) for share in shares.values()))
            for rank, shares in self.by_rank.items()
        ]
        return text_table([("rank", *PHASES), *rows])


def in_words(shares: Mapping[str, float]) -> str:
    """What took time: "computing 84 %, optimizer 15 %"."""
    shown = {name: share for name, share in shares.items() if share >= LEAST_SHOWN}
    return ", ".join(f"{PHASE_WORDS[name]} {percent(share, 0)}" for name, share in shown.items())


@dataclass(frozen=True)
class Diagnosis:
    """Why a training is slow.

    `verdict` is "data", "slow rank", "communication", "too small", "validating", "saving",
    "callbacks", "balanced", or "unknown" where too little was measured. `share` (0..1) of the time
    is what its cause takes; `rank` the slow one, `cause` the phase in which it is.
    `measured` says what it is made of, beside `shares`; `missing` what could not be measured.
    """

    verdict: str
    sentence: str
    next_step: str
    share: float = 0.0
    rank: int | None = None
    cause: str = ""
    measured: str = ""
    missing: tuple[str, ...] = ()
    shares: Shares = field(default_factory=lambda: Shares({}), repr=False)

    def __repr__(self) -> str:
        rows = [f"next: {self.next_step}", self.measured, in_words(self.shares.mean)]
        rows += [f"not measured: {what}" for what in self.missing]
        return "\n  ".join([self.sentence, *filter(None, rows)])


_NEXT = {
    "data": "workers=N reads with more processes; ds.cached(limit_gib) keeps the files on this "
    "host; make the transform smaller images first.",
    "communication": "a larger batch_size=, or accumulate=, sends the gradients less often; "
    "precision='bf16' computes faster, so look again after it.",
    "too small": "a larger batch_size= gives each rank more to compute in a step; so short a step "
    "gains little from more ranks.",
    "validating": "validate_every= with a larger number, or a smaller validation set.",
    "saving": "checkpoint_every= with a larger number, or a time such as '10m'.",
    "callbacks": "do it every 10th step: `if info.step % 10 == 0`.",
    "balanced": "gpupool.scaling(network, data, options) measures what more ranks would give.",
}
_SLOW = {
    "data": "its disk or cores are slower, or its samples larger: ds.cached(limit_gib), workers=N.",
    "compute": "%gpupool gpus shows who else uses its GPU, and its temperature.",
    "optimizer": "%gpupool gpus shows who else uses its GPU, and its temperature.",
    "callbacks": "one of the callbacks does more on this rank: have it do less, or less often.",
}


def diagnose(history: TrainingHistory) -> Diagnosis:
    """The verdict on a training, also on one that still runs."""
    shares, num_steps = Shares.of(history), len(history.steps)
    missing = ("communication: there is one rank",) if len(history.ranks) == 1 else ()
    known: dict[str, Any] = {"missing": missing, "shares": shares}
    if num_steps < LEAST_STEPS or not shares.by_rank:
        return Diagnosis(
            "unknown",
            f"Too little to say: {num_steps} steps, and a verdict needs {LEAST_STEPS}.",
            "train longer: max_steps=100 is enough.",
            **known,
        )
    step_s = median(event.step_s or 0.0 for event in history.ranks.values())
    found = max(_causes(shares, step_s), key=lambda one: one.share)
    if found.share < WORTH:
        words = f"Nothing stands out: {percent(shares.mean['compute'], 0)} of the time"
        found = _cause("balanced", 0.0, f"{words} is computing.")
    measured = f"{num_steps:,} steps, {milliseconds(step_s)} each"
    return replace(found, measured=measured, **known)


def _causes(shares: Shares, step_s: float) -> list[Diagnosis]:
    """What takes time that a step need not take, each with its share."""
    by_rank = shares.by_rank
    data = median(one["data"] for one in by_rank.values())
    exchange = min(one["exchange"] for one in by_rank.values())
    callbacks = median(one["callbacks"] for one in by_rank.values())
    found = [
        _cause("data", data, f"Each rank waits for data {percent(data, 0)} of its time."),
        _cause("callbacks", callbacks, f"Callbacks take {percent(callbacks, 0)} of the time."),
    ]
    for name, verb in (("validating", "Validating"), ("saving", "Saving")):
        share = max(one[name] for one in by_rank.values())  # one rank writes, the others wait
        found.append(_cause(name, share, f"{verb} takes {percent(share, 0)} of the time."))
    if len(by_rank) > 1:
        found += _slow_rank(shares)
        words = f"The gradients on their way take {percent(exchange, 0)} of the time."
        found.append(_cause("communication", exchange, words))
    # The optimizer is none of it: that of a large network takes long for any batch.
    fixed = shares.mean["exchange"] + shares.mean["rest"]
    if step_s < SHORT_STEP_S and fixed > max(one.share for one in found if one.verdict != "data"):
        words = f"A step is so short ({milliseconds(step_s)}) that {percent(fixed, 0)} of it is"
        found.append(_cause("too small", fixed, f"{words} the same for any batch."))
    return found


def _slow_rank(shares: Shares) -> list[Diagnosis]:
    """The rank that the others wait for, if its own time explains what they wait."""
    by_rank = shares.by_rank
    own = {rank: sum(one[name] for name in _OWN) for rank, one in by_rank.items()}
    slow = max(own, key=lambda rank: own[rank])
    if by_rank[slow]["saving"] >= WORTH:  # the thread that writes slows it down
        return []
    others = [rank for rank in by_rank if rank != slow]
    gap = own[slow] - median(own[rank] for rank in others)
    waits = median(by_rank[rank]["exchange"] for rank in others) - by_rank[slow]["exchange"]
    if gap < WORTH or waits < EXPLAINS * gap:
        return []
    usual = {name: median(by_rank[rank][name] for rank in others) for name in _OWN}
    cause = max(_OWN, key=lambda name: by_rank[slow][name] - usual[name])
    what = {"data": "reading its data", "compute": "computing"}.get(cause, f"its {cause}")
    waited = f"The others wait for rank {slow} {percent(gap, 0)} of the time"
    sentence = f"{waited}: it is slower in {what}."
    return [Diagnosis("slow rank", sentence, _SLOW[cause], gap, slow, cause)]


def _cause(verdict: str, share: float, sentence: str) -> Diagnosis:
    return Diagnosis(verdict, sentence, _NEXT[verdict], share)
