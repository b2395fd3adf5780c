"""Batch norms that a step must not train. Runs on engines; knows only torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Evaluating:
    """While this lasts, these batch norms are in evaluation mode.

    With `only_single` those alone that get one value a channel, which has no variance: torch
    refuses to train them on it.
    """

    def __init__(self, modules: list[Any], *, only_single: bool) -> None:
        self._modules = [module for module in modules if module.training]
        self._only_single = only_single
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            if self._only_single:
                self._hooks.append(module.register_forward_pre_hook(_evaluate_single))
            else:
                module.training = False

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module.training = True


def _evaluate_single(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].numel() == inputs[0].shape[1]:
        module.training = False
