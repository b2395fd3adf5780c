"""LARS: a learning rate for each layer, for very large batches. Runs on engines; knows only torch.

You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks",
https://arxiv.org/abs/1708.03888, algorithm 1: with weights w, gradient g and weight decay b,

    local = trust * |w| / (|g| + b |w|)
    v = momentum * v + lr * local * (g + b w)
    w = w - v

Parameters of one dimension (biases, weights of norms) have local = 1, as is usual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Layerwise(torch.optim.Optimizer, ABC):
    """An optimizer that steps the parameters of a group together; see `_step_group`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; gives what `closure`, which computes the gradients, gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        return loss

    @abstractmethod
    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Change `parameters`, those of `group` that have a gradient."""


class LARS(Layerwise):
    """See the module. Groups may have an `lr` and `weight_decay` of their own."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        decay, lr = group["weight_decay"], group["lr"]
        gradients = [p.grad for p in parameters]
        directions = torch._foreach_add(gradients, parameters, alpha=decay)  # type: ignore[arg-type]
        # Of each parameter a number on its device, none of which is read.
        norms = torch._foreach_norm(parameters), torch._foreach_norm(gradients)  # type: ignore[arg-type]
        rates = [
            lr * _trust(p, weights, gradient, decay, group["trust_coefficient"])
            for p, weights, gradient in zip(parameters, *norms, strict=True)
        ]
        torch._foreach_mul_(directions, rates)
        # The learning rate is inside the velocity, as in the paper: torch's SGD has it outside.
        buffers = [self._buffer(p) for p in parameters]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, directions)
        torch._foreach_sub_(parameters, buffers)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _trust(
    p: Tensor, of_weights: Tensor, of_gradient: Tensor, decay: float, trust: float
) -> Tensor:
    """The local learning rate; 1 where weights or gradient are 0, too."""
    if p.ndim < 2:
        return torch.ones_like(of_weights)
    local = trust * of_weights / (of_gradient + decay * of_weights)
    return local.where((of_weights > 0) & (of_gradient > 0), 1.0)
