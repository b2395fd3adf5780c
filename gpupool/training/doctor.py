"""Why a training is slow: a verdict from what its ranks have spent their time on. Pure; client.

The thresholds are those of TraceML 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median

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
LEAST_STEPS, LEAST_S = 20, 1.0  # of less than a second the start alone takes most
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
        """Those so far; a rank no step of which was measured is left out."""
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
    """

    verdict: str
    sentence: str
    next_step: str
    share: float = 0.0
    rank: int | None = None
    cause: str = ""
    measured: str = ""
    shares: Shares = field(default_factory=lambda: Shares({}), repr=False)

    def __repr__(self) -> str:
        rows = [f"next: {self.next_step}", self.measured, in_words(self.shares.mean)]
        return "\n  ".join([self.sentence, *filter(None, rows)])


_SAID = {
    "data": "Each rank waits for data {share} of its time.",
    "communication": "The gradients on their way take {share} of the time.",
    "too small": "A step is so short ({step}) that {share} of it is the same for any batch.",
    "validating": "Validating takes {share} of the time.",
    "saving": "Saving takes {share} of the time.",
    "callbacks": "Callbacks take {share} of the time.",
    "balanced": "Nothing stands out: {share} of the time is computing.",
}
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
    "compute": "look who else uses its GPU (%gpupool gpus), or its cores (top).",
    "optimizer": "look who else uses its GPU (%gpupool gpus), or its cores (top).",
    "callbacks": "one of the callbacks does more on this rank: have it do less, or less often.",
}


def diagnose(history: TrainingHistory) -> Diagnosis:
    shares, num_steps = Shares.of(history), len(history.steps)
    elapsed_s = max((sum(event.spent.values()) for event in history.ranks.values()), default=0.0)
    if num_steps < LEAST_STEPS or elapsed_s < LEAST_S or not shares.by_rank:
        said = f"Too little to say: a verdict needs {LEAST_STEPS} steps and {LEAST_S:g} s."
        return Diagnosis("unknown", said, "train longer: max_steps=100 is enough.", shares=shares)
    step_s = median(event.step_s or 0.0 for event in history.ranks.values())
    measured = f"{num_steps:,} steps, {milliseconds(step_s)} each"
    slow = _slow_rank(shares.by_rank)
    causes = _causes(shares, slow, step_s)
    verdict = max(causes, key=lambda name: causes[name])
    share = shown = causes[verdict]
    if share < WORTH:
        verdict, share, shown = "balanced", 0.0, shares.mean["compute"]
    elif slow is not None and verdict == "slow rank":
        return replace(slow, measured=measured, shares=shares)
    said = _SAID[verdict].format(share=percent(shown, 0), step=milliseconds(step_s))
    return Diagnosis(verdict, said, _NEXT[verdict], share, measured=measured, shares=shares)


def _causes(shares: Shares, slow: Diagnosis | None, step_s: float) -> dict[str, float]:
    """What takes time that a step need not take: the share of each."""
    ranks = shares.by_rank.values()
    found = {name: median(one[name] for one in ranks) for name in ("data", "callbacks")}
    # One rank writes, the others wait.
    found |= {name: max(one[name] for one in ranks) for name in ("validating", "saving")}
    if slow is not None:
        found["slow rank"] = slow.share
    if len(ranks) > 1:
        found["communication"] = min(one["exchange"] for one in ranks)
    # The optimizer is none of it: that of a large network takes long for any batch.
    fixed = shares.mean["exchange"] + shares.mean["rest"]
    if step_s < SHORT_STEP_S and fixed > max(found[name] for name in found if name != "data"):
        found["too small"] = fixed
    return found


def _slow_rank(by_rank: Mapping[int, Mapping[str, float]]) -> Diagnosis | None:
    """The rank that the others wait for, if its own time explains what they wait."""
    own = {rank: sum(one[name] for name in _OWN) for rank, one in by_rank.items()}
    slow = max(own, key=lambda rank: own[rank])
    others = [rank for rank in by_rank if rank != slow]
    # Where it writes a checkpoint, the thread that does slows it down.
    if not others or by_rank[slow]["saving"] >= WORTH:
        return None
    gap = own[slow] - median(own[rank] for rank in others)
    waits = median(by_rank[rank]["exchange"] for rank in others) - by_rank[slow]["exchange"]
    if gap < WORTH or waits < EXPLAINS * gap:
        return None
    usual = {name: median(by_rank[rank][name] for rank in others) for name in _OWN}
    cause = max(_OWN, key=lambda name: by_rank[slow][name] - usual[name])
    what = {"data": "reading its data", "compute": "computing"}.get(cause, f"its {cause}")
    waited = f"The others wait for rank {slow} {percent(gap, 0)} of the time"
    sentence = f"{waited}: it is slower in {what}."
    return Diagnosis("slow rank", sentence, _SLOW[cause], gap, slow, cause)
