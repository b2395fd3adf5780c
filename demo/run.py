"""`make demo` and `make lab`: the quick-start notebook against an S3 server of its own.

python -m demo.run           execute it headless; results go to build/
python -m demo.run --lab     open it in JupyterLab
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from traitlets.config import Config

from demo import photos
from demo.s3 import SeaweedServer

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
BUILD = ROOT / "build"
_CELL_TIMEOUT_S = 1800


def main() -> None:
    """Start the server, fill a bucket, run the notebook."""
    parser = argparse.ArgumentParser(description="The quick-start notebook on an S3 server here.")
    parser.add_argument("--lab", action="store_true", help="open JupyterLab instead of executing")
    parser.add_argument("--num-train", type=int, default=6000, help="training images in the bucket")
    parser.add_argument("--num-test", type=int, default=1000, help="test images in the bucket")
    chosen = parser.parse_args()
    with SeaweedServer() as server:
        os.environ.update(server.env)
        os.environ["GPUPOOL_DEMO_URL"] = server.make_bucket("photos")
        fill(os.environ["GPUPOOL_DEMO_URL"], chosen.num_train, chosen.num_test)
        if chosen.lab:
            lab()
        else:
            report(execute(NOTEBOOK, BUILD))


def fill(url: str, num_train: int, num_test: int) -> None:
    """Put real labelled photographs into the bucket, in class folders; says which."""
    began = time.monotonic()
    images = photos.source()
    counts = photos.upload(url, images, num_train=num_train, num_test=num_test)
    print(f"Images: {images.name}.")
    print(
        f"{counts['train']} training and {counts['test']} test images are in {url} "
        f"({time.monotonic() - began:.0f} s).",
        flush=True,
    )


def execute(notebook: Path, build: Path) -> Path:
    """Run a notebook headless; its outputs and a self-contained HTML page go to `build`."""
    build.mkdir(parents=True, exist_ok=True)
    print(f"Running {notebook.name} ...", flush=True)
    document = nbformat.read(notebook, as_version=4)
    executed = build / notebook.name
    with tempfile.TemporaryDirectory() as folder:
        # Unix sockets in a private folder: on a shared machine nobody else can listen in.
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}
        client = NotebookClient(
            document,
            timeout=_CELL_TIMEOUT_S,
            kernel_name="python3",
            config=Config({"KernelManager": sockets}),
            # the kernel works in the notebook's folder, as it does in JupyterLab
            resources={"metadata": {"path": str(notebook.parent)}},
        )
        try:
            client.execute()
        finally:  # also of a failed run: it shows the error
            _save(document, executed)
    return executed


def _save(document: nbformat.NotebookNode, executed: Path) -> None:
    nbformat.write(document, executed)
    executed.with_suffix(".html").write_text(to_html(document), encoding="utf-8")


def to_html(document: nbformat.NotebookNode) -> str:
    """The notebook as one page that needs no network."""
    exporter = HTMLExporter(embed_images=True)
    # These would be loaded from the web; what the notebook shows is plain HTML and SVG.
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    exporter.widget_renderer_url = exporter.mermaid_js_url = ""
    page, _ = exporter.from_notebook_node(document)
    # The template's scripts for formulas and diagrams, of which there are none.
    return re.sub(r"<script[^>]*>(?:(?!</script>).)*</script>", "", str(page), flags=re.DOTALL)


def report(executed: Path) -> None:
    """Say where the results are and how good the network got."""
    document = nbformat.read(executed, as_version=4)
    text = "".join(
        output.get("text", "")
        for cell in document.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )
    accuracy = re.search(r"Test accuracy: .*", text)
    print(accuracy[0] if accuracy else "The notebook printed no test accuracy.")
    print(f"Notebook: {executed}")
    print(f"Page:     {executed.with_suffix('.html')}")
    if accuracy is None:
        sys.exit(1)


def lab() -> None:
    """Open the notebook in JupyterLab until it is ended (Ctrl-C twice)."""
    command = [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.root_dir={NOTEBOOK.parent}",
        f"--LabApp.default_url=/lab/tree/{NOTEBOOK.name}",  # the printed address opens it too
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # Jupyter refuses root otherwise; containers run as root
    process = subprocess.Popen(command)
    while True:
        try:
            sys.exit(process.wait())
        except KeyboardInterrupt:  # JupyterLab got it too, and asks whether it is meant
            continue


if __name__ == "__main__":
    main()
