"""How a network is trained, as one frozen dataclass that is checked when it is made. Runs anywhere.

Its fields, and what each means, are in `fields.py`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import OptionsError
from gpupool.core.options import checks, effects, other_names, serialise
from gpupool.core.options.fields import Profile, TrainingFields, option_help, option_parameters
from gpupool.core.options.pool_options import refuse_unknown

if TYPE_CHECKING:
    from gpupool.core.options.model_facts import ModelFacts
    from gpupool.core.options.plan import TrainingPlan


class _Made:
    """A class attribute that is made when it is read: `import gpupool` does not wait for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = cache(make)

    def __get__(self, one: object, kind: type) -> Any:
        return self._make()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions(TrainingFields):
    """How a network is trained.

    `batch_size` is global: the samples of one optimizer step over all ranks. Each rank computes its
    share, and the result is that of one process with the whole batch.
    """

    # A type checker would take what it accepts, any name, for what the class accepts.
    if not TYPE_CHECKING:
        # Not in `__init__`, which the dataclass writes. pickle and copy call this without values.
        def __new__(cls, *args: Any, **values: Any) -> TrainingOptions:
            """Refuse names that are no option with a better word than Python's TypeError."""
            if args:
                raise OptionsError(
                    f"TrainingOptions({args[0]!r}, ...): options are given by name, as "
                    "TrainingOptions(optimizer='sgdm', lr=0.01).",
                    "by position",
                )
            refuse_unknown(
                values,
                list(cls.__dataclass_fields__),
                {**other_names.OTHERS, **other_names.NAMES},
                other_names.ELSEWHERE,
                "`gpupool.TrainingOptions?` explains them all.",
            )
            # Not `super()`: slots=True makes a second class, and `super()` would mean the first.
            return object.__new__(cls)

    def __repr__(self) -> str:
        return serialise.in_words(self)

    def __post_init__(self) -> None:
        checks.check_values(self)
        effects.check_effects(self)

    def check_for(
        self,
        *,
        has_validation: bool,
        num_ranks: int | None = None,
        num_samples: int | None = None,
        is_stream: bool = False,
        model: ModelFacts | None = None,
    ) -> None:
        """Refuse what does nothing with this data, model and these ranks; of resolved options.

        Args:
            num_samples: None where it is not known; of a stream nobody knows it.

        Raises:
            OptionsError: with what was meant.
        """
        effects.check_for(
            self,
            has_validation=has_validation,
            num_ranks=num_ranks,
            num_samples=num_samples,
            is_stream=is_stream,
            model=model,
        )

    def to_json(self) -> str:
        """All options as JSON text.

        Raises:
            OptionsError: one is a function or an object, which JSON cannot hold, or a URL with a
                password in it.
        """
        return serialise.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> TrainingOptions:
        """The options that `to_json` wrote.

        Raises:
            OptionsError: it is no such text, or an option is unknown or refused.
        """
        return cls(**serialise.from_json(text, Profile))

    def explain(
        self, model: Any = None, dataset: Any = None, validation: Any = None, pool: Any = None
    ) -> TrainingPlan:
        """What `train` would do with these arguments and options; shows itself in a notebook.

        Args:
            model, dataset, validation: as for `train`; what depends on one left out is not shown.
            pool: the pool to train on, or a number of CPU ranks; the one of this notebook if left
                out.

        Raises:
            OptionsError: `train` would refuse the options.
        """
        from gpupool.core.options.planning import make_plan  # loaded only for this

        return make_plan(self, model, dataset, validation, pool)


def _manual() -> str:
    """The docstring, with every option below it."""
    lines = [_HEAD]
    try:
        options = option_help()
    except OSError:  # a package without its sources
        return _HEAD
    heading = ""
    for option in options:
        if option.heading != heading:
            heading = option.heading
            lines += ["", f"{heading[0].upper()}{heading[1:]}:"]
        named = " ".join(f'"{word}"' for word in option.words if f'"{word}"' not in option.meaning)
        meaning = f"{option.meaning} {'One of: ' + named if named else ''}"
        shown = textwrap.fill(meaning, 92, initial_indent=_INDENT, subsequent_indent=_INDENT)
        lines += [f"    {option.name} = {option.default}", shown]
    return "\n".join(lines)


_INDENT = " " * 8
_HEAD = inspect.cleandoc(TrainingOptions.__doc__ or "")
# After the dataclass was made, which writes a docstring and a signature of its own.
TrainingOptions.__doc__ = _Made(_manual)  # type: ignore[assignment]
TrainingOptions.__signature__ = _Made(  # type: ignore[attr-defined]
    lambda: inspect.Signature(option_parameters())
)
