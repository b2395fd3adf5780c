"""A loss that is not finite names the sample that holds such a number, else it is divergence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import gpupool
from gpupool import Pool, TrainingResult
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on, weights

NUM, BAD = 64, 37


def spoilt(half: int = 0, value: float = float("nan"), *rows: int) -> TensorDataset:
    """Samples with number targets, some of which are not finite in their inputs or targets."""
    inputs, classes = samples(NUM).tensors
    halves = inputs.clone(), classes.float()[:, None].repeat(1, 3)
    for row in rows or (BAD,):
        halves[half][row, 1] = value
    return TensorDataset(*halves)


def warning_of(result: TrainingResult) -> str:
    (message,) = [one.message for one in result.history.warnings if one.about == "not finite"]
    return message


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("half", ["inputs", "targets"])
def test_the_sample_is_named_whatever_the_number_of_ranks(
    pools: Pools, ranks: int, half: str
) -> None:
    data = spoilt(half == "targets")
    result = train_on(pools[ranks], network(), data, loss="mse", batch_size=8, epochs=2)
    assert (result.stopped_by, len(result.history.warnings)) == ("diverged", 1)
    found = warning_of(result)
    assert f"the {half} of sample {BAD} hold NaN. " in found
    step = next(one.step for one in result.history.steps if one.loss != one.loss)
    assert found.startswith(f"Loss became NaN at step {step}: the ")


def test_several_are_counted_and_infinite_numbers_said(pool2: Pool) -> None:
    data = spoilt(0, float("inf"), *range(NUM))
    found = warning_of(train_on(pool2, network(), data, loss="mse", batch_size=8))
    assert "hold infinite numbers, and 7 more of this step are so. " in found


@pytest.mark.parametrize("weighted", [False, True])
def test_divergence_keeps_its_sentence(pool2: Pool, weighted: bool) -> None:
    more = {"weights": [1.0] * NUM} if weighted else {}
    result = train_on(
        pool2,
        network(),
        spoilt(0, 1.0),
        loss="mse",
        optimizer="sgdm",
        lr=1e30,
        batch_size=8,
        **more,
    )
    assert warning_of(result).endswith("training diverged. Try a smaller lr, warmup= or clip=.")


def test_of_samples_that_come_again_the_index_is_that_of_the_data_set(pool2: Pool) -> None:
    class Rows(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            inputs = torch.full((8,), float(index))
            return (inputs / 0 * 0 if index == 5 else inputs), torch.zeros(3)

    heavy = [10.0 if index == 5 else 1.0 for index in range(16)]
    result = train_on(pool2, network(), Rows(), loss="mse", batch_size=8, weights=heavy, lr=1e-6)
    assert "of sample 5 hold NaN" in warning_of(result)


def test_a_training_that_goes_on_is_the_one_that_did_not_look(pool2: Pool) -> None:
    class Logged(nn.Module):  # so that the weights stay finite
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.net(inputs.nan_to_num())
            return outputs

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        errors = (outputs - targets.nan_to_num()) ** 2
        mean = errors.mean()
        return mean + (targets.sum() * 0).detach()  # NaN, with the gradient of what is finite

    torch.manual_seed(0)
    data, clean = spoilt(1), spoilt(1, 0.0)
    settings = {"loss": loss, "batch_size": 8, "on_divergence": "tell", "epochs": 2}
    going_on, plain = (train_on(pool2, Logged(), one, **settings) for one in (data, clean))
    assert f"the targets of sample {BAD} hold NaN" in warning_of(going_on)
    assert (going_on.stopped_by, len(going_on.history.steps)) == ("epochs", 16)
    assert torch.equal(weights(going_on.model), weights(plain.model))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """One that can be walked through as often as it is asked, or once."""

    def __init__(self, is_once: bool = False) -> None:
        self.is_once, self.walks = is_once, 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.walks += 1
        if not (self.is_once and self.walks > 1):
            inputs, targets = spoilt().tensors
            yield from zip(inputs, targets, strict=True)


@pytest.mark.parametrize("is_once", [False, True])
def test_a_stream_is_walked_through_again_if_it_can_be(pool2: Pool, is_once: bool) -> None:
    result = train_on(pool2, network(), Stream(is_once), loss="mse", batch_size=8)
    assert result.stopped_by == "diverged"
    words = "training diverged" if is_once else f"the inputs of sample {BAD} hold NaN"
    assert words in warning_of(result)


def test_a_data_set_that_knows_names_says_the_url(pool2: Pool, tmp_path: Path) -> None:
    from torchvision.transforms.functional import to_pil_image

    for number in range(16):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        level = torch.full((3, 4, 4), 255 if number == 6 else number, dtype=torch.uint8)
        to_pil_image(level).save(folder / f"{number}.png")

    def transform(image: Tensor) -> Tensor:
        scaled = image.float() / 255
        return scaled / (scaled < 1)  # infinite where it is white

    data = gpupool.ImageDatastore(str(tmp_path)).with_transform(transform)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    found = warning_of(train_on(pool2, net, data, batch_size=4))
    assert f"({tmp_path}/a/6.png) hold infinite numbers" in found
