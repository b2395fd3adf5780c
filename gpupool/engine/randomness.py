"""The random numbers of a step, from its number alone. Runs on engines; knows only torch."""

from __future__ import annotations

import torch

_MASK = 2**64 - 1


def seed_step(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Set torch's generators, of the CPU and of `device`, to what (seed, rank, step) say.

    So a training that goes on after a checkpoint draws what it would have drawn without one.
    """
    key = step_key(seed, rank, step)
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def step_key(seed: int, rank: int, step: int) -> int:
    """A number in 0..2**64-1, by SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", doi 10.1145/2660193.2660195).

    Its lower half is as good: torch's generator of the CPU takes no more.
    """
    key = seed
    for part in (rank, step):
        key = _mixed((key + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK)
    return key


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
