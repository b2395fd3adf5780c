"""Errors in the user's own parts of a training, as a notebook shows them: cell, line and source."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.notebook.kernel import Kernel
from tests.support.raising import frames_of_ours

SETUP = """%load_ext gpupool
%gpupool start --cpu -n 2
import torch, gpupool
from torch import nn
from gpupool import TrainingOptions, train
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
def options(**more):
    return TrainingOptions(epochs=1, batch_size=8, **more)"""
NETWORK = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        y = self.layer(x)
        return y.missing_name
"""
DATA = """class Data:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        item = index + 1
        return missing_name
"""
# what fails -> (the cell, the line of it that fails)
PARTS = {
    "forward": (f"{NETWORK}train(Net(), data, options=options())", 7),
    "__getitem__": (f"{DATA}train(nn.Linear(4, 2), Data(), options=options())", 6),
    "a process that reads": (
        f"{DATA}train(nn.Linear(4, 2), Data(), options=options(workers=2))",
        6,
    ),
    "transform": (
        "def half(image):\n    return missing_name\n"
        "train(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), "
        "gpupool.ImageDatastore(folder).with_transform(half), options=options())",
        2,
    ),
    "loss": (
        "def loss(outputs, targets):\n    return missing_name\n"
        "train(nn.Linear(4, 2), data, loss, options=options())",
        2,
    ),
    "callback": (
        "def callback(info):\n    return missing_name\n"
        "train(nn.Linear(4, 2), data, options=options(callbacks=[callback]))",
        2,
    ),
}


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("images")
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8)).save(folder / name / f"{number}.png")
    assert clean_kernel.run(f"{SETUP}\nfolder = {str(folder)!r}").status == "ok"
    return clean_kernel


@pytest.mark.parametrize("part", PARTS)
def test_an_error_shows_the_line_of_the_cell_and_no_frame_of_ours(
    kernel: Kernel, part: str
) -> None:
    source, line = PARTS[part]
    cell = kernel.run(source)
    place, shown = f"Cell In[{cell.number}], line {line}", cell.error_text
    assert shown.splitlines()[0].endswith(f"; {place})")
    assert f"\n{place}, in " in shown  # the frame, and the arrow at its line
    assert any(row.startswith(f"----> {line} ") for row in shown.splitlines())
    assert "missing_name" in shown.rpartition("---->")[2].splitlines()[0]
    assert not frames_of_ours(shown)
    assert "torch/" not in shown
    assert "contextlib.py" not in shown  # how torch decorates functions
