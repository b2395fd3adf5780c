"""What is said of torch's own errors: which module, what it takes, what it got, what to do."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpupool.data.reading.samples import apply_transform
from gpupool.engine.cells.module_errors import explained

PLAIN = torch.zeros(6, 10)
LABELS = torch.zeros(6, dtype=torch.int64)


def said(call: Callable[[], object]) -> tuple[str, str]:
    """What torch says of `call`, which fails, and what we make of it."""
    with pytest.raises(Exception) as caught:
        call()
    error = caught.value
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(error), explained(str(error), error, frames)


def layers(*modules: nn.Module) -> nn.Module:
    """A network whose modules are called layers.0, layers.1 and so on."""
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*modules)))


OTHER = "make its {} 10, or give it other inputs"
FLOAT = "give the inputs as float32 (`.float()` in the data set)"
HEAD = layers(nn.Linear(10, 10), nn.ReLU(), nn.Linear(20, 3, bias=False))
IMAGES = torch.zeros(2, 1, 8, 8)

# (network, its input) -> how what is added to torch's own message begins, and how it ends
SIZES: dict[str, tuple[nn.Module, Tensor, str, str]] = {
    "linear": (
        HEAD,
        PLAIN,
        "layers.2 (Linear(in_features=20, out_features=3, bias=False)): ",
        "; it takes float32 (..., 20), and got float32 6 x 10: "
        "make its in_features 10, or change what comes before it",
    ),
    "first": (
        HEAD,
        torch.zeros(6, 5),
        "layers.0 (Linear(",
        "got float32 6 x 5: make its in_features 5, or give it other inputs",
    ),
    "float64": (
        HEAD,
        PLAIN.double(),
        "layers.0 (Linear(",
        "got float64 6 x 10: give the inputs as float32 (`.float()` in the data set)",
    ),
    "int64": (HEAD, PLAIN.long(), "layers.0 (", FLOAT),
    "uint8": (HEAD, PLAIN.byte(), "layers.0 (", "(`.float().div(255)` in the data set)"),
    "inside": (
        layers(nn.Linear(10, 10).double(), nn.Linear(10, 3)),
        PLAIN.double(),
        "layers.1 (Linear(",
        FLOAT,
    ),
    "channels": (
        layers(nn.Conv2d(3, 4, 3)),
        IMAGES,
        "layers.0 (Conv2d(3, 4, ",
        "; it takes float32 (N, 3, H, W), and got float32 2 x 1 x 8 x 8: "
        "make its in_channels 1, or give it other inputs",
    ),
    "dimensions": (
        layers(nn.Conv2d(3, 4, 3)),
        PLAIN,
        "layers.0 (Conv2d(",
        "its number of dimensions is another one; give it other inputs",
    ),
    "batch norm": (
        layers(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(3)),
        IMAGES,
        "layers.1 (BatchNorm2d(",
        "make its num_features 4, or change what comes before it",
    ),
    "layer norm": (
        layers(nn.LayerNorm(7)), PLAIN, "layers.0 (LayerNorm(", OTHER.format("normalized_shape"),
    ),
    "lstm": (
        layers(nn.LSTM(9, 4)), PLAIN[:, None], "layers.0 (LSTM(", OTHER.format("input_size"),
    ),
    "embedding": (
        layers(nn.Embedding(10, 4)),
        torch.tensor([[0, 15]]),
        "layers.0 (Embedding(10, 4)): ",
        "; it takes int64 numbers from 0 to 9, and got int64 1 x 2: "
        "numbers from 0 to 15; make num_embeddings 16, or give it other inputs",
    ),
    "embedding of floats": (
        layers(nn.Embedding(10, 4)),
        PLAIN,
        "layers.0 (Embedding(",
        "give the inputs as int64 (`.long()` in the data set)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_the_module_is_named_with_what_it_takes_and_got(case: str) -> None:
    network, inputs, begin, end = SIZES[case]
    torch_says, we_say = said(lambda: network(inputs))
    assert we_say.startswith(begin)
    assert torch_says.rstrip(".") in we_say
    assert we_say.endswith(end)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) @ torch.zeros(5, 5)


def test_an_error_in_the_users_own_forward_is_left_as_it_is() -> None:
    torch_says, we_say = said(lambda: Own()(PLAIN))
    assert we_say == torch_says
    assert said(lambda: Own()(PLAIN[:, :5]))[1].startswith("layer (Linear(")  # and torch's is not


def test_a_missing_argument_is_said_by_python() -> None:
    torch_says, we_say = said(lambda: layers(nn.Bilinear(2, 2, 2))(PLAIN))
    assert we_say == torch_says


@pytest.mark.parametrize("loss", [functional.cross_entropy, nn.CrossEntropyLoss()])
def test_targets_of_another_type_or_out_of_the_classes(loss: Any) -> None:
    outputs = torch.zeros(6, 3)
    for wrong in (LABELS.int(), LABELS.float(), LABELS.double()):
        torch_says, we_say = said(lambda wrong=wrong: loss(outputs, wrong))  # type: ignore[misc]
        assert we_say.startswith(f"{torch_says}: a loss over classes takes the targets as int64")
        assert f"got {str(wrong.dtype).removeprefix('torch.')} 6." in we_say
    we_say = said(lambda: loss(outputs, LABELS + 5))[1]
    assert we_say.startswith("Target 5 is out of bounds: the network has 3 outputs, for the ")
    assert said(lambda: loss(outputs, LABELS[:4]))[1].endswith(
        "; the outputs are float32 6 x 3, the targets int64 4"
    )


def test_transforms_of_torchvision_are_told_that_pictures_are_tensors() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    picture = torch.zeros(3, 4, 4, dtype=torch.uint8)
    for transform, way_on in (
        (transforms.ToTensor(), "leave ToTensor or PILToTensor out"),
        (transforms.Normalize([0.5] * 3, [0.5] * 3), "use ds.with_normalization(mean, std)"),
        (transforms.Compose([transforms.ToTensor()]), "leave ToTensor or PILToTensor out"),
    ):
        we_say = said(lambda t=transform: apply_transform(t, "a.png", picture))[1]  # type: ignore[misc]
        assert "pictures come as uint8 tensors" in we_say
        assert we_say.endswith(way_on)
