"""The optimizer that options ask for. Runs on engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.options.model_facts import match_factors
from gpupool.core.options.training_options import TrainingOptions

_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgdm": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train; those with learn-rate factor 0 are frozen.

    Each of its groups has a "lr_factor": the factor on the learning rate of its parameters.

    Raises OptionsError for a pattern that matches no parameter, or a callable that makes no
    optimizer; TrainingError if nothing trains.
    """
    groups = parameter_groups(model, options)
    if callable(options.optimizer):
        made = options.optimizer(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise OptionsError(
                f"optimizer={options.optimizer!r} gave a {type(made).__name__}: it must make a "
                "torch.optim.Optimizer of the parameter groups that it gets."
            )
        for group in made.param_groups:  # it may have made groups of its own
            group.setdefault("lr_factor", 1.0)
        return made
    kind = _KINDS[options.optimizer]
    settings: dict[str, Any] = {"momentum": 0.9} if options.optimizer == "sgdm" else {}
    if options.momentum is not None:
        settings["momentum"] = options.momentum
    if options.optimizer != "rmsprop":
        # One kernel for all parameters; torch itself would choose `foreach`, several of them.
        parameters = [p for group in groups for p in group["params"]]
        settings["fused"] = all(p.is_cuda and p.is_floating_point() for p in parameters)
    return kind(groups, options.lr, **settings)


def parameter_groups(model: nn.Module, options: TrainingOptions) -> list[dict[str, Any]]:
    """The parameters that train, grouped by their factors on learning rate and weight decay."""
    names = [name for name, _ in model.named_parameters()]
    rates = match_factors("learn_rate_factors", names, options.learn_rate_factors)
    decays = match_factors("weight_decay_factors", names, options.weight_decay_factors)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if rates[name] == 0:
            parameter.requires_grad_(False)
        elif parameter.requires_grad:
            groups.setdefault((rates[name], decays[name]), []).append(parameter)
    if not groups:
        raise TrainingError(
            "the model has no parameter that trains: all are frozen, or it has none."
        )
    found = []
    for (rate, decay), parameters in groups.items():
        group = {"params": parameters, "lr": options.lr * rate, "lr_factor": rate}
        if options.weight_decay or not callable(options.optimizer):  # which may have its own
            group["weight_decay"] = options.weight_decay * decay
        found.append(group)
    return found
