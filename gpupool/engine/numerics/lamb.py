"""LAMB: Adam with a learning rate for each layer, for very large batches. Runs on engines.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
https://arxiv.org/abs/1904.00962, algorithm 2: with weights w, gradient g and weight decay b,

    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + b w
    w = w - lr |w| / |r| r

with the norms of each parameter; where one of them is 0 their quotient is 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gpupool.engine.numerics.lars import Layerwise


class LAMB(Layerwise):
    """See the module. Groups may have an `lr` and `weight_decay` of their own."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        gradients: Any = [p.grad for p in parameters]
        states = [self._state(p) for p in parameters]
        averages, squares = ([state[name] for state in states] for name in ("m", "v"))
        for state in states:  # a number of the host: a tensor would have to be read
            state["step"] += 1
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

        directions = torch._foreach_div(averages, [1 - beta1 ** s["step"] for s in states])
        spreads = torch._foreach_div(squares, [1 - beta2 ** s["step"] for s in states])
        torch._foreach_sqrt_(spreads)
        torch._foreach_add_(spreads, group["eps"])
        torch._foreach_div_(directions, spreads)
        torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        # Of each parameter a number on its device, none of which is read.
        norms = torch._foreach_norm(parameters), torch._foreach_norm(directions)
        rates = [group["lr"] * _trust(w, r) for w, r in zip(*norms, strict=True)]
        torch._foreach_mul_(directions, rates)
        torch._foreach_sub_(parameters, directions)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
        return state


def _trust(of_weights: Tensor, of_direction: Tensor) -> Tensor:
    return (of_weights / of_direction).where((of_weights > 0) & (of_direction > 0), 1.0)
