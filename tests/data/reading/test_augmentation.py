"""Augmentation depends on (seed, epoch, index) alone."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.samples import Draw

IMAGE = torch.randint(0, 256, (3, 40, 48), dtype=torch.uint8, generator=torch.Generator())
TRANSFORMS: dict[str, Any] = {
    "RandomResizedCrop": v2.RandomResizedCrop(24, antialias=True),
    "RandomCrop": v2.RandomCrop(24, padding=4),
    "RandomHorizontalFlip": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]),
    "ColorJitter": v2.ColorJitter(0.5, 0.5, 0.5, 0.2),
    "RandomErasing": v2.RandomErasing(p=0.9, value="random"),
    "RandAugment": v2.RandAugment(),
    "TrivialAugmentWide": v2.TrivialAugmentWide(),
    "AutoAugment": v2.AutoAugment(),
    "AugMix": v2.AugMix(),
    "RandomAffine": v2.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10),
    "RandomPerspective": v2.RandomPerspective(p=0.9),
    "ElasticTransform": v2.ElasticTransform(),
    "GaussianBlur": v2.GaussianBlur(5, (0.1, 3.0)),
    "GaussianNoise": v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise()]),
    "RandomPhotometricDistort": v2.RandomPhotometricDistort(p=0.9),
    "RandomChoice": v2.RandomChoice([v2.RandomInvert(0.9), v2.RandomSolarize(9.0), v2.Identity()]),
    "RandomOrder": v2.RandomOrder([v2.RandomRotation(20), v2.ColorJitter(0.9)]),
    "RandomApply": v2.RandomApply([v2.RandomPosterize(2, p=0.8)], p=0.7),
    "RandomZoomOut": v2.Compose([v2.RandomZoomOut(p=0.9), v2.Resize((24, 24))]),
}


def drawn(transform: Any, index: int, draw: Draw = Draw(3, 5)) -> Tensor:  # noqa: B008
    with keyed_draws(draw, index):
        result: Tensor = transform(IMAGE)
    return result


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torchvision_gives_the_same_in_any_thread_and_order(name: str) -> None:
    transform = TRANSFORMS[name]
    torch.manual_seed(0)
    expected = [drawn(transform, index) for index in range(12)]
    torch.manual_seed(1)
    order = random.Random(0).sample(range(12), 12)
    with ThreadPoolExecutor(4) as pool:
        again = dict(zip(order, pool.map(lambda i: drawn(transform, i), order), strict=True))
    assert all(torch.equal(again[index], expected[index]) for index in range(12))
    assert len({image.numpy().tobytes() for image in expected}) > 1  # it does draw
    other = [drawn(transform, index, Draw(3, 6)) for index in range(12)]
    assert any(not torch.equal(a, b) for a, b in zip(other, expected, strict=True))


FUNCTIONS: dict[str, Any] = {
    "rand": lambda: torch.rand(4),
    "randn": lambda: torch.randn(4),
    "randint": lambda: torch.randint(0, 1000, (4,)),
    "randperm": lambda: torch.randperm(40),
    "normal": lambda: torch.normal(torch.zeros(4), torch.ones(4)),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "bernoulli of a tensor": lambda: torch.full((40,), 0.5).bernoulli(),
    "multinomial": lambda: torch.multinomial(torch.ones(40), 9),
    "multinomial of a tensor": lambda: torch.ones(40).multinomial(9),
    "poisson": lambda: torch.poisson(torch.full((40,), 9.0)),
    "binomial": lambda: torch.binomial(torch.full((40,), 9.0), torch.full((40,), 0.5)),
    "rand_like": lambda: torch.rand_like(torch.zeros(4)),
    "rand_like of another type": lambda: torch.rand_like(IMAGE, dtype=torch.float64),
    "randn_like": lambda: torch.randn_like(torch.zeros(4)),
    "randint_like": lambda: torch.randint_like(torch.zeros(40), 9),
    "randint_like from": lambda: torch.randint_like(torch.zeros(40), low=5, high=50),
    "uniform_": lambda: torch.empty(4).uniform_(2, 3),
    "normal_": lambda: torch.empty(4).normal_(),
    "random_": lambda: torch.empty(4).random_(0, 1000),
    "bernoulli_": lambda: torch.empty(40).bernoulli_(0.5),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "geometric_": lambda: torch.empty(40).geometric_(0.2),
    "cauchy_": lambda: torch.empty(4).cauchy_(),
    "log_normal_": lambda: torch.empty(4).log_normal_(),
    "Beta": lambda: torch.distributions.Beta(0.4, 0.4).sample((4,)),
    "Gamma": lambda: torch.distributions.Gamma(0.4, 0.4).sample((4,)),
    "a generator of None": lambda: torch.rand(4, generator=None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_of_torch_draws_is_keyed(name: str) -> None:
    def draw(index: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with keyed_draws(Draw(0, 0), index):
            values: Tensor = FUNCTIONS[name]()
        assert torch.equal(torch.get_rng_state(), before)  # the shared one was left alone
        return values

    assert torch.equal(draw(7, 1), draw(7, 2))
    assert not torch.equal(draw(7, 1), draw(8, 1))


def test_bounds_and_types_are_those_asked_for() -> None:
    with keyed_draws(Draw(0, 0), 0):
        assert set(torch.randint_like(torch.zeros(400), 5, 8).tolist()) == {5.0, 6.0, 7.0}
        assert set(torch.randint_like(torch.zeros(400), 3, dtype=torch.int64).tolist()) == {0, 1, 2}
        assert torch.rand_like(torch.zeros(2, 3), dtype=torch.float64).dtype == torch.float64
        assert 0 <= torch.rand_like(torch.zeros(400)).min() < 0.1


def test_one_call_after_another_draws_other_numbers() -> None:
    with keyed_draws(Draw(0, 0), 0):
        assert not torch.equal(torch.rand(4), torch.rand(4))


def test_a_generator_of_the_users_is_used() -> None:
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    with keyed_draws(Draw(0, 0), 0):
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(5)), expected)


def test_other_threads_and_what_comes_after_draw_from_the_shared_generator() -> None:
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    found = []
    with keyed_draws(Draw(0, 0), 0):
        thread = threading.Thread(target=lambda: found.append(torch.rand(4)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    torch.manual_seed(9)
    with keyed_draws(None, 0):
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(("seed", "epoch", "index"), [(0, 0, 0), (-1, 3, 2**40), (2**70, 0, 5)])
def test_keys_differ_by_seed_epoch_and_index(seed: int, epoch: int, index: int) -> None:
    keys = {
        Draw(seed + a, epoch + b).key(index + c)
        for a in range(3)
        for b in range(3)
        for c in range(3)
    }
    assert len(keys) == 27
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_are_the_same_in_any_process() -> None:
    assert Draw(1, 2).key(3) == 13041116711478803063
