"""Muon for matrices and AdamW for everything else, as one optimizer. Runs on engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for parameters of two dimensions, `torch.optim.AdamW` for all others.

    Steps of matrices are scaled to be as large as AdamW's (Liu et al. 2025, "Muon is scalable for
    LLM training", https://arxiv.org/abs/2502.16982, section 2.2), so one `lr` is right for both.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        self._parts: tuple[torch.optim.Optimizer, ...] = ()
        made = []
        for group in groups:
            settings = {"lr": lr, "weight_decay": weight_decay, **group}
            for is_matrix in (True, False):
                params = [p for p in group["params"] if (p.ndim == 2) == is_matrix]
                if params:
                    made.append({**settings, "params": params, "is_matrix": is_matrix})
        settings = {"lr": lr, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw", **settings}
        parts = []
        for is_matrix, make, more in (
            (True, torch.optim.Muon, muon),
            (False, torch.optim.AdamW, settings),
        ):
            own = [group for group in made if group["is_matrix"] == is_matrix]
            if own:
                parts.append(make(own, **more))
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = tuple(parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; gives what `closure`, which computes the gradients, gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            is_matrix = isinstance(part, torch.optim.Muon)
            # `load_state_dict` makes new ones
            part.param_groups = [g for g in self.param_groups if g["is_matrix"] == is_matrix]
            part.state = self.state
            part.step()
        return loss
