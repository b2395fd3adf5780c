"""`python -m demo.picture` takes docs/quickstart.png, and quickstart-dark.png: a training in
JupyterLab, as it runs.

Needs what the browser tests need: Chromium and the extra "test".
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from demo.notebooks import ROOT
from demo.run import fill
from tests.browser.lab import Lab
from tests.browser.page import Browser, Page
from tests.servers.s3 import SeaweedServer

PICTURES = {dark: ROOT / "docs" / f"quickstart{dark}.png" for dark in ("", "-dark")}
WIDTH = 1470  # CSS pixels; the side bars are cut off
_NUM_TRAIN, _BATCH_SIZE = 3000, 64
CELLS = [
    "%load_ext gpupool\n%gpupool start --env AWS_*",
    '%%spmd\nprint(f"rank {rank} of {world_size} on {device}")',
    "import gpupool, torchvision\n"
    'images = gpupool.ImageDatastore("s3://photos/train")\n'
    "train, validation = images.split_each_label(0.9, seed=0)\n"
    "network = gpupool.replace_head(torchvision.models.resnet18(), len(images.classes))\n"
    f"options = gpupool.TrainingOptions(lr=0.0025, batch_size={_BATCH_SIZE}, epochs=5)",
    "result = gpupool.train(network, train, options=options, validation=validation)",
]
# The fourth of five epochs has begun: three validations, and curves to look at.
_FAR_ENOUGH = f"canvas => Number(canvas.dataset.points) > {3.3 * 0.9 * _NUM_TRAIN / _BATCH_SIZE}"
_UNSEEN = """
const kernel = nb.context.sessionContext.session.kernel;
await kernel.requestExecute({code: arg, silent: true}).done;"""
_CROP = """() => {
    const cells = [...document.querySelectorAll('.jp-NotebookPanel .jp-Cell')];
    const boxes = cells.map(cell => cell.getBoundingClientRect());
    const [x, y] = [boxes[0].left, boxes[0].top - 8];
    return {x, y, width: boxes[0].width, height: boxes.at(-1).bottom + 8 - y};
}"""


def main() -> None:
    """Run the cells, wait, take the pictures."""
    with SeaweedServer() as server, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.env)  # for the photographs; the kernel gets none of it
        fill(server.make_bucket("photos"), _NUM_TRAIN, 100)
        with Lab(Path(folder), ROOT) as lab, Browser() as browser:
            page = browser.open(lab, lab.write("quickstart.ipynb", CELLS))
            page.resize(WIDTH, 1400)
            page.js(_UNSEEN, f"import os; os.environ.update({server.env!r})")
            take(page)
    for picture in PICTURES.values():
        print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


def take(page: Page) -> None:
    """Run all cells and take the pictures while the last one trains; then stop it."""
    for index in range(len(CELLS) - 1):
        page.run_cell(index)
        page.wait_idle()
    page.run_cell(len(CELLS) - 1)
    canvas = page.cell(len(CELLS) - 1).locator(".gpm canvas").nth(1)
    canvas.wait_for(timeout=120_000)
    page.wait_for(_FAR_ENOUGH, canvas, timeout_s=500)
    for dark, picture in PICTURES.items():
        page.use_dark_theme(bool(dark))
        page.raw.screenshot(path=picture, clip=page.raw.evaluate(_CROP))
    page.interrupt()
    page.wait_idle()


if __name__ == "__main__":
    main()
