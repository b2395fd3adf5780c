"""Options as keywords of `train`. Runs anywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.option_help import parameters
from gpupool.core.options.training_options import TrainingOptions


def with_keywords(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of `function` with every option by name instead of its last parameter.

    Completion in a notebook reads it.
    """
    signature = inspect.signature(function)
    own = list(signature.parameters.values())[:-1]
    return signature.replace(parameters=[*own, *parameters(TrainingOptions)])


def merged(
    loss: Any, options: TrainingOptions | None, keywords: Mapping[str, Any]
) -> tuple[Any, TrainingOptions]:
    """The loss and the options of a call of `train`: `keywords` replace single fields of `options`.

    Options in the place of the loss, `train(model, dataset, options)`, count as options.

    Raises:
        OptionsError: a name that is no option, a value that is none, or options given twice.
    """
    if isinstance(loss, TrainingOptions):
        if options is not None:
            raise OptionsError(
                "train(...) has TrainingOptions twice, as loss and as options: the loss comes "
                "third, as 'cross_entropy', and options=... after it."
            )
        loss, options = "auto", loss
    if options is None:
        return loss, TrainingOptions(**keywords)
    if not isinstance(options, TrainingOptions):
        raise OptionsError(
            f"options is a {type(options).__name__}: give a gpupool.TrainingOptions(...), or its "
            "fields by name, as train(model, dataset, epochs=1)."
        )
    # `replace` makes new options, which are checked as a whole.
    return loss, replace(options, **keywords) if keywords else options
