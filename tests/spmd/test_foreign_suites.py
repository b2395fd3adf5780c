"""What libraries ship to prove that they work on several processes, run in cells."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.notebook.kernel import Kernel

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
]
SUM = "%%spmd\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2 --hang-after 5s")
        yield kernel


@pytest.mark.parametrize("suite", ["test_script", "test_ops", "test_sync", "test_cli"])
def test_accelerates_suites_pass_twice(kernel: Kernel, suite: str) -> None:
    cell = (
        "%%spmd\nimport warnings; warnings.simplefilter('ignore')\n"
        f"from accelerate.test_utils.scripts import {suite} as suite\nsuite.main()\nprint('passed')"
    )
    for _ in range(2):
        done = kernel.run(cell)
        assert done.errors == [], done.error_text
        assert "passed" in done.text
        assert kernel.run(SUM).text == "[0, 1] 2.0"


def test_accelerates_suite_that_hangs_on_cpus_is_told_and_freed(kernel: Kernel) -> None:
    """It joins uneven inputs, which Accelerate does on GPUs alone: by itself it hangs, too."""
    cell = (
        "%%spmd\nimport warnings; warnings.simplefilter('ignore')\n"
        "from accelerate.state import AcceleratorState; AcceleratorState._reset_state(True)\n"
        "from accelerate.test_utils.scripts import test_distributed_data_loop as suite\n"
        "suite.main()"
    )

    def hangs(cell: object) -> bool:
        return "Hang: the ranks have been in different collectives" in str(vars(cell))

    done = kernel.run(cell, meanwhile=[(hangs, kernel.press_stop)], timeout_s=120)
    assert "KeyboardInterrupt: in " in done.error_text
    assert "Test joining uneven inputs" in done.text
    assert kernel.run(SUM).text == "[0, 1] 2.0"
