"""Bad input, typed into a real notebook: one sentence that says what to do, and the pool goes on.

The notebook's environment has the S3 keys; its ranks do not, until `%gpupool env` sends them.
"""

from __future__ import annotations

import re

import pytest

from tests.notebook.kernel import Cell, Kernel, without_progress
from tests.servers.s3 import SeaweedServer

PREPARE = """
import os
os.environ.update({env!r})
ds = gpupool.ImageDatastore({url!r} + "/train").with_transform(lambda image: image.float())
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 28 * 28, 10))
once = gpupool.TrainingOptions(epochs=1)
"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    hide = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''"
    assert clean_kernel.run(f"{hide}\n%load_ext gpupool\nimport gpupool, torch").status == "ok"
    return clean_kernel


@pytest.fixture(scope="module")
def pool(kernel: Kernel, s3: SeaweedServer, photos_url: str) -> Kernel:
    """The same with a pool, images, a network, and keys that only the notebook has."""
    prepare = PREPARE.format(env=s3.env, url=photos_url)
    assert kernel.run(f"%gpupool start\n{prepare}").status == "ok"
    return kernel


def refusal(cell: Cell) -> str:
    assert cell.status == "error"
    assert [output["type"] for output in without_progress(cell.outputs)] == ["error"]
    assert "\n" not in cell.error_text
    (error,) = cell.errors
    assert cell.error_text == f"{error['ename']}: {error['evalue']}"
    return cell.error_text


def still_usable(kernel: Kernel) -> bool:
    return kernel.run("%spmd (rank, dist.get_world_size())").text == "[0] (0, 2)\n[1] (1, 2)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%gpupool start --gpus 0", "PlacementError: GPU '0' "),  # not there, or hidden
        ("gpupool.start(m=2)", "OptionsError: 'm' is not an option. There are: "),
    ],
)
def test_a_pool_that_cannot_be_started_says_why_and_leaves_none(
    kernel: Kernel, line: str, said: str
) -> None:
    assert refusal(kernel.run(line)).startswith(said)
    assert kernel.run("%gpupool").text.startswith("No pool runs in this notebook.")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("gpupool.ImageDatastore('s3://photos/no')", "DataNotFoundError: s3://photos/no"),
        ("gpupool.train(net, None)", "TrainingError: dataset is a NoneType, which is no data set"),
        ("gpupool.TrainingOptions(lr=-1)", "OptionsError: lr=-1: must be a finite number above 0"),
    ],
)
def test_bad_data_or_a_bad_network_is_refused_in_the_notebook(
    pool: Kernel, code: str, said: str
) -> None:
    assert refusal(pool.run(code)).startswith(said)
    assert still_usable(pool)


def test_training_without_keys_on_the_ranks_or_with_a_wrong_one(
    pool: Kernel, s3: SeaweedServer
) -> None:
    (error,) = pool.run("gpupool.train(net, ds, options=once)").errors
    assert error["ename"] == "SpmdError"
    assert "CredentialsError: s3://photos/train" in error["evalue"]
    assert "`%gpupool env AWS_*` sends the notebook's key to every rank." in error["evalue"]
    assert "Set AWS" not in error["evalue"]  # they are set, in the notebook
    pool.run("os.environ['AWS_SECRET_ACCESS_KEY'] = 'wrong-key-0123456789'\n%gpupool env AWS_*")
    cell = pool.run("gpupool.train(net, ds, options=once)")
    assert "the store refused the access key (SignatureDoesNotMatch)" in cell.errors[0]["evalue"]
    assert "Traceback" not in cell.error_text
    assert not re.search(r"line \d+", cell.error_text)
    assert "wrong-key" not in cell.error_text + cell.text + cell.html
    assert still_usable(pool)
    pool.run(f"os.environ.update({s3.env!r})\n%gpupool env AWS_*")
    # nobody looks, as where nbclient executes a file: there are lines for its log
    cell = pool.run("gpupool.train(net, ds, options=once)", allow_stdin=False)
    assert cell.status == "ok"
    assert "finished  epoch 1/1" in "".join(o.get("text", "") for o in cell.outputs)
