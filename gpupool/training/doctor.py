"""Why a training is slow: a verdict from what its ranks have spent their time on. Pure; client.

The thresholds are those of TraceML 0.5: from 10 % of the time a cause is worth naming, a verdict
needs 20 steps, and a slow rank has to explain 80 % of what the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from gpupool.core.formatting import milliseconds, text_table
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
LEAST_STEPS = 20
EXPLAINS = 0.8  # of what the others wait: a slow rank's own time has to
SHORT_STEP_S = 0.01  # of so short a step most is the same for any batch
_OWN = ("data", "compute", "optimizer", "callbacks")
_BESIDE = ("validating", "saving")


@dataclass(frozen=True)
class Shares:
    """What each rank has spent its time on: `by_rank[rank][phase]`, 0..1, of all its time.

    Phases: it waits for its batch ("data"); computes forward and backward ("compute"); waits for
    the gradients of the others and for those on their way ("exchange"); "optimizer"; "callbacks";
    "validating"; "saving"; and the "rest". The first step, which sets things up, is left out.
    """

    by_rank: dict[int, dict[str, float]]

    @classmethod
    def of(cls, spent: Mapping[int, Mapping[str, float]]) -> Shares:
        """From seconds; ranks no step of which was measured are left out."""
        return cls(
            {
                rank: {name: seconds.get(name, 0.0) / sum(seconds.values()) for name in PHASES}
                for rank, seconds in sorted(spent.items())
                if seconds.get("compute")
            }
        )

    @classmethod
    def of_history(cls, history: TrainingHistory) -> Shares:
        """Those of a training so far."""
        return cls.of({rank: event.spent for rank, event in history.ranks.items()})

    def mean(self, phase: str) -> float:
        """Of all ranks."""
        return fmean(shares[phase] for shares in self.by_rank.values())

    def __repr__(self) -> str:
        rows = [
            (str(rank), *(_percent(share) for share in shares.values()))
            for rank, shares in self.by_rank.items()
        ]
        return text_table([("rank", *PHASES), *rows])


@dataclass(frozen=True)
class Diagnosis:
    """Why a training is slow.

    `verdict` is "data", "slow rank", "communication", "too small", "validating", "saving",
    "callbacks", "balanced", or "unknown" where too little was measured. `share` (0..1) of the time
    is what its cause takes; `rank` the slow one, `cause` the phase in which it is.
    `evidence` are numbers, `missing` what could not be measured.
    """

    verdict: str
    sentence: str
    next_step: str = ""
    share: float = 0.0
    rank: int | None = None
    cause: str = ""
    evidence: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    shares: Shares = field(default_factory=lambda: Shares({}), repr=False)

    def __repr__(self) -> str:
        rows = [f"  {name}: {value}" for name, value in self.evidence.items()]
        rows += [f"  next: {self.next_step}"] * bool(self.next_step)
        rows += [f"  not measured: {what}" for what in self.missing]
        return "\n".join([self.sentence, *rows])


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
    shares, num_steps = Shares.of_history(history), len(history.steps)
    known: dict[str, Any] = {"missing": _missing(history), "shares": shares}
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
        found = Diagnosis("balanced", _balanced(shares), _NEXT["balanced"])
    evidence = {"a step": milliseconds(step_s), "steps": f"{num_steps:,}"}
    evidence |= {
        name: f"{_percent(shares.mean(name))} of the time"
        for name in PHASES
        if shares.mean(name) >= 0.005
    }
    return replace(found, evidence=evidence, **known)


def _causes(shares: Shares, step_s: float) -> list[Diagnosis]:
    """What takes time that a step need not take, each with its share."""
    by_rank = shares.by_rank
    data = median(one["data"] for one in by_rank.values())
    exchange = min(one["exchange"] for one in by_rank.values())
    callbacks = median(one["callbacks"] for one in by_rank.values())
    found = [
        _cause("data", data, f"Each rank waits for data {_percent(data)} of its time."),
        _cause("callbacks", callbacks, f"Callbacks take {_percent(callbacks)} of the time."),
    ]
    for name, verb in (("validating", "Validating"), ("saving", "Saving")):
        share = max(one[name] for one in by_rank.values())  # one rank writes, the others wait
        found.append(_cause(name, share, f"{verb} takes {_percent(share)} of the time."))
    if len(by_rank) > 1:
        found += _slow_rank(shares)
        found.append(
            _cause(
                "communication",
                exchange,
                f"The gradients on their way take {_percent(exchange)} of the time.",
            )
        )
    idle = 1 - shares.mean("compute") - data - sum(map(shares.mean, (*_BESIDE, "callbacks")))
    if step_s < SHORT_STEP_S and idle > max(one.share for one in found if one.verdict != "data"):
        words = f"A step is so short ({milliseconds(step_s)}) that {_percent(idle)} of it is not"
        found.append(_cause("too small", idle, f"{words} spent on computing."))
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
    sentence = (
        f"The others wait for rank {slow} {_percent(gap)} of the time: it is slower in {what}."
    )
    return [Diagnosis("slow rank", sentence, _SLOW[cause], gap, slow, cause)]


def _cause(verdict: str, share: float, sentence: str) -> Diagnosis:
    return Diagnosis(verdict, sentence, _NEXT[verdict], share)


def _balanced(shares: Shares) -> str:
    return f"Nothing stands out: ranks compute {_percent(shares.mean('compute'))} of the time."


def _missing(history: TrainingHistory) -> tuple[str, ...]:
    found = []
    if all(event.utilization is None for event in history.ranks.values()):
        found.append("how busy the GPUs were: the driver does not say")
    if len(history.ranks) == 1:
        found.append("communication: there is one rank")
    return tuple(found)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
