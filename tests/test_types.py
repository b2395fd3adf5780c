"""What a strict type checker says of a user's script. Pyright's engine, from its wheel on PyPI."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOOD = """
import gpupool
import torchvision
from gpupool import GpuTable, Predictions, RankError, Share

network = gpupool.replace_head(torchvision.models.resnet18(), 3)
network.fc  # a ResNet still
images = gpupool.ImageDatastore("s3://bucket/train")
options = gpupool.TrainingOptions(optimizer="adamw", lr=1, schedule=[("cosine", 3)], keep="best")
result = gpupool.train(network, images, options=options, shuffle="once", precision="bf16")
names: Predictions = gpupool.predict(result.model, images, names=True)
print(names.scores.shape, gpupool.predict(result.model, images).argmax(1))
print(result.predict(images, names=True).classes)
table: GpuTable = gpupool.gpus()
def step(share: Share) -> int:
    return share.num_here
def text(error: RankError) -> str:
    return error.traceback
"""
BAD = {
    'gpupool.ImageDatastor("x")': "reportAttributeAccessIssue",
    "gpupool.TrainingOptions(epoch=3)": "reportCallIssue",
    'gpupool.TrainingOptions(optimizer="adm")': "reportArgumentType",
    'gpupool.train(model, data, shuffle="sometimes")': "reportArgumentType",
    "gpupool.train(model, data, epochs='3')": "reportArgumentType",
    "gpupool.replace_head(model, 3).nosuch(1, 2)()": None,  # a module may have any attribute
}


@pytest.fixture(scope="module")
def pyright() -> str:
    beside = Path(sys.executable).with_name("basedpyright")
    program = str(beside) if beside.exists() else shutil.which("basedpyright")
    if program is None:
        pytest.skip("basedpyright is not installed")
    return program


def test_a_script_is_understood_and_slips_in_it_are_found(pyright: str, tmp_path: Path) -> None:
    head = (
        "import gpupool\nfrom torch import nn\n"
        "model: nn.Module = nn.Linear(1, 1)\ndata: list[int] = []\n"
    )
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(head + "\n".join(BAD))
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [pyright, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    found = json.loads(done.stdout)["generalDiagnostics"]
    good = [one for one in found if one["file"].endswith("good.py")]
    # torchvision has no types; an attribute on a line of its own is meant
    theirs = ("reportUnknown", "reportMissingTypeStubs", "reportUnusedExpression")
    assert [one for one in good if not one["rule"].startswith(theirs)] == []
    first = head.count("\n")
    rules = {
        line: {
            o["rule"]
            for o in found
            if o["range"]["start"]["line"] == first + number and o["file"].endswith("bad.py")
        }
        for number, line in enumerate(BAD)
    }
    assert {
        line: wanted for line, wanted in BAD.items() if wanted and wanted not in rules[line]
    } == {}
