"""Which values `TrainingOptions` takes, and the sentence for any other. Runs anywhere.

What has no effect although its value is right is refused in `effects.py`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from gpupool.core.errors import OptionsError
from gpupool.core.options import fields, other_names, sampling
from gpupool.core.options.fields import Profile, TrainingFields
from gpupool.core.options.pool_options import folder_url, number, one_of, parse_duration_s
from gpupool.core.wire.masking import without_passwords

SCHEDULES = get_args(fields.Schedule)
WORDS: dict[str, tuple[str, ...]] = {
    "shuffle": get_args(fields.Shuffle),
    "on_error": get_args(fields.OnError),
    "scale": get_args(fields.Scale),
    "normalize": get_args(fields.Normalize),
    "clip_method": get_args(fields.ClipMethod),
    "precision": get_args(fields.Precision),
    "compress": get_args(fields.Compress),
    "batch_norm": get_args(fields.BatchNorm),
    "bn_statistics": get_args(fields.BnStatistics),
    "keep": get_args(fields.Keep),
    "on_divergence": get_args(fields.OnDivergence),
    "on_failure": get_args(fields.OnFailure),
    "progress": get_args(fields.Progress),
    "execution": get_args(fields.Execution),
}
INPUTS = get_args(fields.Inputs)
WEIGHTS = get_args(fields.Weight)
OPTIMIZERS = get_args(fields.Optimizer)
COMPILE_MODES = get_args(fields.CompileMode)
_COUNTS = (
    *("epochs", "max_steps", "batch_size", "accumulate", "drop_period", "cycle_period"),
    *("patience", "num_checkpoints", "log_every"),
)
MAX_WORKERS = 512  # of a rank: more is a slip of the pen
_ABOVE_0 = ("lr", "trust_coefficient", "power", "clip")
_FROM_0 = ("weight_decay", "eps", "min_delta")
_BELOW_1 = ("momentum", "alpha", "min_factor", "warmup_factor")  # and not below 0
_BETWEEN = ("drop_factor", "ema")  # above 0 and below 1


def check_values(options: TrainingFields) -> None:
    """Refuse malformed values; make numbers plain ones and sequences tuples."""
    for name, allowed in WORDS.items():
        value = getattr(options, name)
        if value is not None or not _may_be_none(options, name):
            _word(name, value, allowed)
    _check_optimizer(options.optimizer)
    # Before the schedule, whose pieces are added up and compared with `epochs`: a number by then.
    _check_numbers(options)
    _check_factors(options)
    _check_schedule(options)
    _check_intervals(options)
    _check_places(options)
    _check_sequences(options)
    sampling.check(options)
    if options.compile not in (True, False):
        _word("compile", options.compile, COMPILE_MODES)
    _check_batches(options)
    for name in ("channels_last", "deterministic", "nesterov", "gather", "overwrite"):
        if not isinstance(getattr(options, name), bool):
            raise OptionsError.of(name, getattr(options, name), "must be True or False.", "type")


def warmup_of(value: str | int) -> tuple[int, str]:
    """The number and unit, "epoch" or "step", of a warm-up.

    >>> warmup_of("2 epochs"), warmup_of("500 steps"), warmup_of(7)
    ((2, 'epoch'), (500, 'step'), (7, 'step'))
    """
    match = re.fullmatch(r"\s*(\d+)\s*(epoch|step)?s?\s*", str(value))
    if isinstance(value, bool) or not match or int(match[1]) < 1:
        raise OptionsError.of(
            "warmup", value, "write '1 epoch', '500 steps' or a number of steps.", "form"
        )
    return int(match[1]), match[2] or "step"


def _check_optimizer(value: object) -> None:
    if value == "lm":
        raise OptionsError(
            "optimizer='lm' is not here: choose 'lbfgs', or one of the others.",
            "not here",
            "optimizer",
        )
    if not callable(value) and _is_a(value, "torch.optim.optimizer", "Optimizer"):
        name = type(value).__name__
        named = {"SGD": "sgd"}.get(name, name.lower())
        ours = f"optimizer={named!r}, lr=..., or " if named in OPTIMIZERS else ""
        raise OptionsError(
            f"optimizer={name}(...) is an object, of parameters that the ranks do not have: write "
            f"{ours}optimizer=lambda groups: torch.optim.{name}(groups, lr=...).",
            "object",
            "optimizer",
        )
    _refuse_scheduler("optimizer", value)
    if not callable(value):
        _word("optimizer", value, OPTIMIZERS)
    elif not _can_be_called(value, 1):
        raise OptionsError(
            f"optimizer={_shown(value)} cannot be called with one argument, the parameter groups: "
            "write optimizer=lambda groups: torch.optim.Adam(groups, lr=0.01).",
            "form",
            "optimizer",
        )


def _check_numbers(options: TrainingFields) -> None:
    for name in (*_COUNTS, "seed", "drop_patience", "workers"):
        value = _given(options, name, whole=True)
        if value is not None and name in _COUNTS and value < 1:
            raise OptionsError.of(name, value, "must be above 0.")
        if value is not None and name == "drop_patience" and value < 0:
            raise OptionsError.of(name, value, "must not be negative.")
    if options.workers is not None and not 0 <= options.workers <= MAX_WORKERS:
        raise OptionsError.of(
            "workers", options.workers, f"must be in 0..{MAX_WORKERS}; 0 reads in one thread."
        )
    # `step_key` keeps 64 bits of it: a larger seed would draw what a smaller one draws.
    if not 0 <= options.seed < 2**64:
        raise OptionsError.of("seed", options.seed, "must be in 0..2**64-1.")
    for name in (*_ABOVE_0, *_FROM_0, *_BELOW_1, *_BETWEEN, "max_skipped"):
        value = _given(options, name)
        if value is None:
            continue
        # `not value > 0` refuses NaN as well, with which every comparison is False.
        if name in _ABOVE_0 and not value > 0:
            raise OptionsError.of(name, value, "must be above 0.")
        if name in _FROM_0 and not value >= 0:
            raise OptionsError.of(name, value, "must not be negative.")
        if name in _BELOW_1 and not 0 <= value < 1:
            raise OptionsError.of(name, value, "must be at least 0 and below 1.")
        if name in _BETWEEN and not 0 < value < 1:
            raise OptionsError.of(name, value, "must be above 0 and below 1.")
        if math.isinf(value):
            raise OptionsError.of(name, value, "must be finite.", "not finite")
        if name == "max_skipped" and not 0 < value <= 1:
            raise OptionsError(
                f"max_skipped={value:g}: must be a share of the samples, above 0 and at most 1.",
                "range",
                name,
            )
    if options.accumulate > options.batch_size:
        raise OptionsError.of(
            "accumulate",
            options.accumulate,
            f"a batch of {options.batch_size} cannot be computed in more parts than it "
            "has samples.",
        )


def _check_factors(options: TrainingFields) -> None:
    for name in ("learn_rate_factors", "weight_decay_factors"):
        factors = getattr(options, name)
        if not isinstance(factors, Mapping):
            raise OptionsError.of(name, factors, "give a dict, as {'head.*': 10}.", "type")
        for pattern, factor in factors.items():
            if not isinstance(pattern, str):
                raise OptionsError(
                    f"{name}: {pattern!r} is no pattern of parameter names.", "pattern", name
                )
            number(f"{name}[{pattern!r}]", factor)
        # 0 is allowed here, unlike for `lr`: it freezes the parameters that match.
        bad = {pattern: f for pattern, f in factors.items() if not 0 <= f < math.inf}
        if bad:
            raise OptionsError.of(name, bad, "a factor must be finite and not negative.")
        _put(options, name, {pattern: float(factor) for pattern, factor in factors.items()})


def _check_schedule(options: TrainingFields) -> None:
    schedule = options.schedule
    if options.warmup is not None:
        warmup_of(options.warmup)
    _refuse_scheduler("schedule", schedule)
    if callable(schedule) and not _can_be_called(schedule, 2):
        raise OptionsError(
            f"schedule={_shown(schedule)} cannot be called with step and epoch: write "
            "schedule=lambda step, epoch: factor, which is multiplied with lr.",
            "form",
            "schedule",
        )
    if callable(schedule):
        return
    if isinstance(schedule, str):
        _word("schedule", schedule, SCHEDULES)
        return
    try:
        # Unpacked inside the try: a generator or a pair of the wrong length raises only here.
        pieces = tuple((name, epochs) for name, epochs in schedule)
    except (TypeError, ValueError):
        raise OptionsError.of(
            "schedule",
            schedule,
            "give a name, a callable (step, epoch) -> factor, or pairs, as "
            "[('cosine', 20), ('none', 10)].",
            "form",
        ) from None
    for name, epochs in pieces:
        _word("schedule", name, SCHEDULES)
        if name == "plateau":
            raise OptionsError(
                "schedule: 'plateau' has no length, so it cannot be one of several: give it alone, "
                "schedule='plateau'.",
                "conflict",
                "schedule",
            )
        number(f"schedule[{name!r}]", epochs, whole=True)
    num_epochs = sum(epochs for _, epochs in pieces)
    if num_epochs != options.epochs or any(epochs < 1 for _, epochs in pieces):
        raise OptionsError.of(
            "schedule",
            list(pieces),
            f"has {num_epochs} epochs, the training {options.epochs}; each piece needs at "
            "least one, and all together as many as the training.",
            "length",
        )
    _put(options, "schedule", tuple((name, int(epochs)) for name, epochs in pieces))


# torch's scheduler -> what it is here
_SCHEDULERS = {
    "StepLR": "schedule='piecewise', drop_factor=..., drop_period=...",
    "ExponentialLR": "schedule='exponential', drop_factor=..., drop_period=...",
    "CosineAnnealingLR": "schedule='cosine'",
    "CosineAnnealingWarmRestarts": "schedule='cosine', cycle_period=...",
    "PolynomialLR": "schedule='polynomial', power=...",
    "LinearLR": "warmup='500 steps', or schedule='polynomial'",
    "CyclicLR": "schedule='cyclical', cycle_period=...",
    "OneCycleLR": "schedule='cosine', warmup='1 epoch'",
    "ReduceLROnPlateau": "schedule='plateau', drop_factor=..., drop_patience=...",
    "ConstantLR": "schedule='none'",
    "SequentialLR": "schedule=[('none', 5), ('cosine', 10)]",
}


def _refuse_scheduler(name: str, value: object) -> None:
    """Refuse a class or object of torch.optim.lr_scheduler, also within a partial."""
    value = getattr(value, "func", value)
    kind = value if isinstance(value, type) else type(value)
    if _is_a(value, "torch.optim.lr_scheduler", "LRScheduler"):
        other = "schedule=lambda step, epoch: factor, which is multiplied with lr"
        raise OptionsError(
            f"{name}={kind.__name__} is a scheduler of torch, which needs an optimizer that the "
            f"ranks make: write {_SCHEDULERS.get(kind.__name__, other)}.",
            "scheduler",
            name,
        )


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether `value` is a class, or an object of one, that derives from `module.name`."""
    # By name: torch is not imported for this.
    kind = value if isinstance(value, type) else type(value)
    return any((one.__module__, one.__name__) == (module, name) for one in kind.__mro__)


def _can_be_called(value: Any, num: int) -> bool:
    """Whether `value` takes `num` arguments by position, as far as Python can know it."""
    try:
        inspect.signature(value).bind(*range(num))
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def _shown(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _check_intervals(options: TrainingFields) -> None:
    """`validate_every` and `checkpoint_every`."""
    for name, times in (("validate_every", False), ("checkpoint_every", True)):
        value = getattr(options, name)
        if value is None or value == "epoch":
            continue
        if isinstance(value, str) and times:
            try:
                # A unit is required: "600" alone could be steps or seconds.
                if parse_duration_s(value) is not None and value.strip()[-1] in "smhd":
                    continue
            except OptionsError:  # said below, in the words of this option
                pass
        if isinstance(value, str):
            also = ", or a time such as '10m'" if times else ""
            raise OptionsError.of(name, value, f"write 'epoch' or a number of steps{also}.", "form")
        number(name, value, whole=True)
        if value < 1:
            raise OptionsError.of(name, value, "must be above 0.")
        _put(options, name, int(value))


def _check_batches(options: TrainingFields) -> None:
    """What a batch is, and what is done with it."""
    for name in ("collate", "step"):
        value = getattr(options, name)
        if value is not None and not callable(value):
            raise OptionsError.of(name, value, "must be a function.", "type")
    if options.weight is not None and not callable(options.weight):
        _word("weight", options.weight, WEIGHTS)
    if isinstance(options.inputs, str) and options.inputs not in INPUTS:
        raise OptionsError.of(
            "inputs",
            options.inputs,
            f"choose one of {', '.join(INPUTS)}; a column by its name is "
            f"inputs=({options.inputs!r},).",
            "unknown",
        )
    if not isinstance(options.inputs, str):
        _put(options, "inputs", _parts("inputs", options.inputs))
    _parts("targets", [options.targets])


def _parts(name: str, value: Any) -> tuple[str | int, ...]:
    """Names or numbers of parts of a batch."""
    is_some = isinstance(value, Iterable) and not isinstance(value, Mapping)
    parts = tuple(value) if is_some else ()
    if not parts or not all(isinstance(part, str | int) for part in parts):
        raise OptionsError.of(
            name,
            value,
            "give names of columns, as ('input_ids', 'attention_mask'), or numbers, as (0, 1).",
            "form",
        )
    return parts


def _check_places(options: TrainingFields) -> None:
    for name in ("checkpoint", "tensorboard"):
        if getattr(options, name) is not None:
            _put(options, name, folder_url(name, getattr(options, name)))
    if options.resume in ("yes", "true", "True", "no", "false", "False", "latest", "last"):
        meant = "False" if str(options.resume).lower() in ("no", "false") else "'auto'"
        raise OptionsError(
            f"resume={options.resume!r} would be the path of a checkpoint: did you mean "
            f"resume={meant}?",
            "unknown",
            "resume",
        )
    if not isinstance(options.resume, bool):
        _put(options, "resume", folder_url("resume", options.resume))
    profile = options.profile
    if profile is not None and not isinstance(profile, Profile):
        shown = without_passwords(repr(profile))
        raise OptionsError(
            f"profile={shown}: give gpupool.Profile(url='s3://bucket/traces').", "type", "profile"
        )


def _check_sequences(options: TrainingFields) -> None:
    for name in ("metrics", "callbacks"):
        value = getattr(options, name)
        # a collection of torchmetrics can be walked through, and is one of them
        is_one = isinstance(value, str) or callable(value) or not isinstance(value, Iterable)
        is_by_output = isinstance(value, Mapping) and not is_one
        _put(options, name, dict(value) if is_by_output else (value,) if is_one else tuple(value))
    for callback in options.callbacks:
        if not callable(callback):
            raise OptionsError(
                f"callbacks: {callback!r} cannot be called; give functions of info.",
                "type",
                "callbacks",
            )
    if not isinstance(options.objective, str):
        raise OptionsError.of("objective", options.objective, "give the name of a metric.", "type")
    if options.betas is not None:
        _put(options, "betas", _numbers("betas", options.betas, num=2))
        if not all(0 <= beta < 1 for beta in options.betas):
            raise OptionsError.of("betas", options.betas, "must be at least 0 and below 1.")
    if options.rank_load is not None:
        load = _numbers("rank_load", options.rank_load)
        if not all(0 <= share < math.inf for share in load) or not sum(load) > 0:
            raise OptionsError.of(
                "rank_load", load, "must not be negative, and one must be above 0."
            )
        _put(options, "rank_load", load)


def _numbers(name: str, values: Any, num: int | None = None) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise OptionsError.of(name, values, f"must be {num or 'some'} numbers.", "type")
    values = tuple(values)
    if num is not None and len(values) != num:
        raise OptionsError.of(name, values, f"must be {num} numbers.", "length")
    for value in values:
        number(name, value)
    return tuple(float(value) for value in values)


def _word(name: str, value: object, allowed: tuple[str, ...]) -> None:
    # An unhashable value, a list say, must reach `one_of`, whose sentence says what is allowed.
    is_plain = isinstance(value, (str, int))
    meant = other_names.WORDS.get(name, {}).get(value) if is_plain else None
    if isinstance(value, str) and value not in allowed and value.lower() in allowed:
        meant = value.lower()
    if meant is not None:
        raise OptionsError(
            f"{name}={value!r} is unknown. Did you mean {name}={meant!r}?", "unknown", name
        )
    one_of(name, value, allowed)


def _may_be_none(options: TrainingFields, name: str) -> bool:
    return "None" in str(type(options).__dataclass_fields__[name].type)


def _given(options: TrainingFields, name: str, *, whole: bool = False) -> Any:
    """The number, after making it a plain one: numpy's would overflow. None if it may be left
    out and was."""
    value = getattr(options, name)
    if value is None and _may_be_none(options, name):
        return None
    number(name, value, whole=whole)
    if not math.isnan(value) and not math.isinf(value):
        value = int(value) if whole else float(value)
        _put(options, name, value)
    return value


def _put(options: object, name: str, value: object) -> None:
    object.__setattr__(options, name, value)  # frozen, and not finished yet
