"""Every view in one notebook: pictures for people's eyes, nothing cut, nothing inaccessible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.accessible import grave_faults
from tests.browser.looks import HEIGHT, WIDTHS, cut_elements, save_look
from tests.browser.trainings import SETUP

if TYPE_CHECKING:
    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

FOLDER = """
import numpy as np, pathlib, tempfile
from PIL import Image
pictures = pathlib.Path(tempfile.mkdtemp())
noise = np.random.default_rng(0)
for number, name in enumerate(["cat", "dog", "horse", "a class with quite a long name"]):
    (pictures / name).mkdir()
    for index in range(8):
        pixels = noise.integers(0, 60, (32, 32, 3)) + 45 * number
        Image.fromarray(pixels.astype(np.uint8)).save(pictures / name / f"{index}.png")
images = gpupool.ImageDatastore(str(pictures))
"""
BUSY_GPUS = """
from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.topology import Gpu, GpuProcess
held, alices = (GpuProcess(4711 + n, "python", u, 2**30) for n, u in enumerate(["ada", "alice"]))
gpus = [
    Gpu(0, "GPU-0", "NVIDIA H200", 141 * 2**30, 3 * 2**29, processes=(held,)),
    Gpu(1, "GPU-1", "T4", unavailable="GPU is lost"),
    Gpu(3, "GPU-3", "NVIDIA H200", 141 * 2**30, 57 * 2**30, processes=(alices,)),
]
GpuTable(gpus, {"GPU-0": "rank 0"})
"""
HOSTS = """
from gpupool.notebook.pool.host_table import hosts_shown
from gpupool.pool.status import HostInfo
of = ("4 × NVIDIA H200", "10.1.0.1 (eth0)", "Socket")
hosts = [HostInfo("gpu1", "up", "0-3", *of),
         HostInfo("gpu2", "lost: has not answered for 10 s", "4-7", *of)]
display(hosts_shown(hosts), raw=True)
"""
VIEWS = {  # name of the picture: cell
    "spmd_alike": "%%spmd\nprint('hello of', world_size)\nprint('two lines')",
    "spmd_differs": "%%spmd\nprint('device', device)\nprint('rows', 6250 - 6 * rank)\n"
    "print('x' * 300)\nrank * 2",
    "spmd_figures": "%%spmd\nimport matplotlib.pyplot as plt\n_ = plt.plot([0, rank + 1, 2])\n"
    "plt.show()",
    "spmd_failed": "%%spmd\nif rank == 1:\n    raise ValueError('bad value')\ndist.barrier()",
    "spmd_values": "%%spmd\nkept = {'rank': rank, 'values': list(range(40))}\nkept['rank']",
    "composite": "kept",
    "result": "options = gpupool.TrainingOptions(epochs=2, batch_size=32, metrics=['f1'])\n"
    "result = train(validation=data)",
    "result_summary": "result",
    "confusion": "gpupool.confusion(result.model, data, classes=list('abcd'))",
    "preview": "images.preview(12)",
    "check": "images.check()",
    "own_loop": "%%spmd\nwith gpupool.monitor(['loss', 'accuracy'], num_steps=40) as monitor:\n"
    "    for step in range(1, 41):\n"
    "        monitor.record(step, loss=torch.tensor(1 / step), accuracy=1 - 1 / step)",
    "gpus": "gpupool.gpus()",
    "gpus_busy": BUSY_GPUS,
    "status": "%gpupool",
    "hosts": HOSTS,
}
NAMES = ["pool_bar", *VIEWS]
# Wide tables, and texts as they were written.
MAY_SCROLL = {"gpus_busy", "hosts", "confusion", "spmd_failed"}
OUTPUTS = ".jp-Cell-outputArea"
# Opens what is folded; tells how high the notebook then is.
UNFOLD = """outputs => {
    for (const details of document.querySelectorAll(`${outputs} details`)) details.open = true;
    return document.querySelector('.jp-WindowedPanel-inner, .jp-Notebook').scrollHeight;
}"""


@pytest.fixture(scope="module")
def gallery(shared_lab: Lab, shared_browser: Browser) -> Iterator[Page]:
    """The notebook, its cells run."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    cells = [SETUP + FOLDER, *VIEWS.values()]
    page = shared_browser.open(
        shared_lab, shared_lab.lend_kernel(shared_lab.write("gallery.ipynb", cells))
    )
    for index in range(len(cells)):
        page.run_cell(index)
        page.wait_idle()
    yield page
    shared_browser.close_pages()
    shared_lab.shut_kernels_down()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_cut_and_all_can_be_read(gallery: Page, screenshots: Path, dark: bool) -> None:
    faults = []
    gallery.use_dark_theme(dark)
    # what is cut does not depend on the theme
    for width in () if dark and not gallery.saves_looks else WIDTHS:
        gallery.resize(width, HEIGHT)
        for index, name in enumerate(NAMES):
            outputs = gallery.cell(index).locator(OUTPUTS)
            save_look(gallery, outputs, screenshots, name, dark, width)
            faults += [
                f"{name} at {width} px: {cut}" for cut in cut_elements(outputs, name in MAY_SCROLL)
            ]
    assert not faults
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    height = gallery.raw.evaluate(UNFOLD, OUTPUTS)
    gallery.resize(WIDTHS[-1], height + 400)  # axe-core judges what is on the screen
    last = gallery.cell(len(NAMES) - 1)
    assert last.evaluate("e => e.getBoundingClientRect().bottom < innerHeight")
    assert not grave_faults(gallery, OUTPUTS)
