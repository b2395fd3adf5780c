"""Limits on gradients, as MATLAB's GradientThresholdMethod names them. Runs on engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_SMALL = 1e-6  # added to norms, as torch.nn.utils.clip_grad_norm_ does


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, method: str | None) -> None:
    """Scale or cut the gradients in place; nothing is read from the device.

    "global-l2norm" (None too) and "l2norm" scale what has a larger norm, of all gradients together
    or of a parameter's own; "absolute-value" cuts each element.
    """
    if method == "absolute-value":
        nn.utils.clip_grad_value_(parameters, limit)
        return
    if method != "l2norm":
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        norms = torch._foreach_norm(gradients)
        torch._foreach_add_(norms, _SMALL)
        factors = torch._foreach_reciprocal(norms)
        torch._foreach_mul_(factors, limit)
        torch._foreach_clamp_max_(factors, 1.0)
        torch._foreach_mul_(gradients, factors)
