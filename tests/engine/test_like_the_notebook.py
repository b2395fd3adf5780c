"""How torch is set on the ranks: as in the notebook, and with random numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import gpupool
from gpupool import Pool

DTYPE = "torch.get_default_dtype()"
OTHERS = "torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()"


@pytest.fixture
def pool(pool2: Pool) -> Iterator[Pool]:
    """A pool; torch is set as before afterwards, here and there."""
    yield pool2
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.set_deterministic_debug_mode(0)
    again = "torch.set_default_dtype(torch.float32); torch.set_float32_matmul_precision('highest')"
    pool2.run(again)


class Made(Dataset[tuple[torch.Tensor, int]]):
    """Samples in the default dtype of the process that makes them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(8) * index, index % 3


def test_the_default_dtype_of_the_notebook_is_that_of_the_ranks(pool: Pool) -> None:
    torch.set_default_dtype(torch.float64)
    assert dict(pool.run(DTYPE)) == {0: torch.float64, 1: torch.float64}
    result = gpupool.train(nn.Linear(8, 3), Made(), epochs=1, batch_size=16, progress="none")
    assert result.model.weight.dtype == torch.float64
    assert gpupool.predict(result.model, Made()).dtype == torch.float64
    torch.set_default_dtype(torch.float32)
    assert pool.run(torch.get_default_dtype)[1] == torch.float32


def test_precision_and_determinism_are_the_notebooks_and_what_a_cell_sets_stays_till_it_does(
    pool: Pool,
) -> None:
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert pool.run(OTHERS)[1] == ("medium", 1)
    pool.run("torch.set_default_dtype(torch.float16); torch.set_float32_matmul_precision('high')")
    assert pool.run(f"{DTYPE}, {OTHERS}")[0] == (torch.float16, "high", 1)
    torch.set_default_dtype(torch.float64)
    assert pool.run(f"{DTYPE}, {OTHERS}")[0] == (torch.float64, "high", 1)


def test_ranks_draw_numbers_of_their_own_and_the_same_from_one_seed(pool: Pool) -> None:
    draws = "torch.initial_seed(), torch.rand(1).item(), torch.nn.Linear(2, 2).weight[0, 0].item()"
    before = pool.run(draws)
    pool.restart([1])
    after = pool.run(draws)
    for values in zip(before[0], before[1], after[1], strict=True):
        assert len(set(values)) == 3
    seeded = pool.run("torch.manual_seed(0); torch.rand(1).item()")
    assert seeded[0] == seeded[1]
