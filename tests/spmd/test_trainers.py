"""Trainers of other libraries, in cells."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernel import Kernel

SCRIPTS = Path(__file__).parent / "scripts"
SUM = "%%spmd\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
TRAINED = """
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
of_all = [torch.empty_like(weights) for _ in range(world_size)]
dist.all_gather(of_all, weights)
print(*trained, torch.equal(*of_all), torch.equal(weights, globals().get("earlier", weights)))
earlier = weights
"""

pytestmark = pytest.mark.long


def needs(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2 --hang-after 5s")
        yield kernel


@pytest.mark.parametrize(
    ("script", "trained"),
    [
        pytest.param("lightning_trainer", "DDPStrategy 2 24", marks=needs("pytorch_lightning")),
        pytest.param("hf_trainer", "DistributedDataParallel 2 24", marks=needs("transformers")),
    ],
)
def test_a_trainer_trains_on_all_ranks_and_an_error_in_it_frees_them(
    kernel: Kernel, script: str, trained: str
) -> None:
    """64 samples in batches of 4 on 2 ranks, 3 times: 24 steps. Every run begins with one seed."""
    assert kernel.run("%%spmd\nglobals().pop('earlier', None)").errors == []
    source = (SCRIPTS / f"{script}.py").read_text()
    for _ in range(2):
        done = kernel.run(f"%%spmd\n{source}\nmodel, trained = main()\n{TRAINED}")
        assert done.errors == [], done.error_text
        assert done.text.count(f"{trained} True True") == 2
        assert kernel.run(SUM).text == "[0, 1] 2.0"

        failed = kernel.run("%%spmd\nmain(FailsOnRankOne())")
        assert "rank 1: ValueError: a bad batch" in failed.error_text
        assert "1 was waiting" in failed.error_text
        assert kernel.run(SUM).text == "[0, 1] 2.0"
