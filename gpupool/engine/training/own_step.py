"""A step that the user writes: (network, batch, optimizer) -> loss. Runs on engines.

    def step(network, batch, optimizer):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

The loss is a mean over this rank's samples. When the optimizer steps, the gradients of all ranks
are averaged, each as much as it has samples: they are those of one rank with the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpupool.core.errors import TrainingError
from gpupool.core.options.named_measures import name_of
from gpupool.engine.batches.share import Share
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.ddp import share_tensors
from gpupool.engine.numerics.forward import autocast, seed_step
from gpupool.engine.training.reports import BatchMetrics
from gpupool.engine.training.step import TrainingStep


class OptimizerOf:
    """The optimizer of one network among several: all share one, which steps this one's alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
        self._optimizer = optimizer
        self._own = {id(parameter) for parameter in network.parameters()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its own parameters, with the settings of their groups."""
        groups = [
            {**group, "params": [p for p in group["params"] if id(p) in self._own]}
            for group in self._optimizer.param_groups
        ]
        return [group for group in groups if group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this network."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

    def step(self) -> None:
        """Change the weights of this network."""
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = [(p, p.grad) for p in every if id(p) not in self._own]
        # An optimizer of torch leaves alone what has no gradient.
        for parameter, _ in others:
            parameter.grad = None
        try:
            self._optimizer.step()
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient


class OwnStep(TrainingStep):
    """Makes steps by `options.step`; all ranks call it alike."""

    def _prepare(self) -> None:
        run = self._run
        self._parallel = run.model
        self._checks_unused = False
        self._share: Share | None = None
        run.optimizer.register_step_pre_hook(self._before_update)
        self._networks: Any = run.model
        self._optimizers: Any = run.optimizer
        if isinstance(run.model, nn.ModuleDict):
            self._networks = dict(run.model.items())
            self._optimizers = {
                name: OptimizerOf(run.optimizer, network) for name, network in run.model.items()
            }
        # What DDP does in each forward: buffers that a network computes with are those of rank 0.
        norms = {
            id(b) for m in run.model.modules() if isinstance(m, _BatchNorm) for b in m.buffers()
        }
        self._shared = [buffer for buffer in run.model.buffers() if id(buffer) not in norms]
        share_tensors([*run.model.parameters(), *run.model.buffers()], run.world)

    def _make(self, share: Share) -> list[BatchMetrics]:
        run, options = self._run, self._run.options
        assert options.step is not None
        seed_step(options.seed, run.world.rank, run.step + 1, run.world.device)
        if self._shared:
            share_tensors(self._shared, run.world)
        self._buffers.before_forward(share)
        self._share = share
        # It computes for long, so interrupts are not held. Half a step is never saved.
        run.is_step_complete = False
        norms = self._buffers.batch_norm_context(share.num_here)
        with autocast(run.world.device, options.precision), norms:
            found = options.step(self._networks, share.targets, self._optimizers)
        self._buffers.after_backward(share)
        return [BatchMetrics(share.num_here, _loss(options.step, found, run.world), share.num_here)]

    def prime_ddp(self, share: Share) -> None:
        """There is no DDP here."""

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Average the gradients over ranks, and limit them, before the optimizer uses them."""
        if self._share is None:  # not in a step: the optimizer is being made or loaded
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._run.world.size > 1:
            _average(parameters, self._share, self._run.world)
        self._clip()


def _average(parameters: list[nn.Parameter], share: Share, world: World) -> None:
    """Make each gradient the mean over the samples of all ranks.

    What has a gradient on no rank keeps none, as an optimizer would change it by a zero, too.
    """
    has = torch.tensor([float(p.grad is not None) for p in parameters], device=world.device)
    is_wanted = world.sum(has).tolist()
    by_kind: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, wanted in zip(parameters, is_wanted, strict=True):
        if wanted:
            by_kind.setdefault(parameter.dtype, []).append(parameter)
    weight = share.num_here / share.num_all
    for own in by_kind.values():
        # A placeholder's loss may be anything, also NaN, and 0 times NaN is NaN.
        parts = [
            torch.zeros_like(p).flatten()
            if p.grad is None or not share.num_here
            else p.grad.flatten() * weight
            for p in own
        ]
        flat = world.sum(torch.cat(parts))
        for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))


def _loss(step: Any, found: Any, world: World) -> Tensor:
    """What is shown as the loss: a number, or the sum of several by name."""
    values = list(found.values()) if isinstance(found, Mapping) else [found]
    numbers = [
        value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        for value in values
        if isinstance(value, Tensor | int | float)
    ]
    if not values or len(numbers) < len(values) or any(number.ndim for number in numbers):
        raise TrainingError(
            f"step={name_of(step)} gave {type(found).__name__}: let it return the mean loss of the "
            "batch, a tensor of one number, or a dict of several.",
            "no number",
            "step",
        )
    return torch.stack([number.to(world.device) for number in numbers]).sum()
