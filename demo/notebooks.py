"""Executes the notebooks headless, and keeps their outputs free of traces of the machine."""

from __future__ import annotations

import getpass
import re
import socket
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
ALL = sorted(FOLDER.glob("*.ipynb"))
NOTEBOOK = FOLDER / "01_quickstart.ipynb"
_CELL_TIMEOUT_S = 1800
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_SITE = re.compile(r"/[^\s\"'<>]*/site-packages/")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def execute(notebook: Path, build: Path) -> Path:
    """Run a notebook headless; its outputs and a self-contained HTML page go to `build`.

    Each cell is named before it runs, and what it prints after it. Returns the path of the executed
    notebook. Raises nbclient's CellExecutionError, with what was done so far in `build`, if a cell
    fails that is not tagged "raises-exception".
    """
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
            record_timing=False,
            config=Config({"KernelManager": sockets}),
            # the kernel works in the notebook's folder, as it does in JupyterLab
            resources={"metadata": {"path": str(notebook.parent)}},
            # as in JupyterLab: where nobody looks, each training writes lines for a log
            on_notebook_start=lambda notebook: setattr(client.kc, "allow_stdin", True),
            on_cell_execute=_name,
            on_cell_executed=_show,
        )
        try:
            client.execute()
        finally:  # also of a failed run: it shows the error
            nbformat.write(document, executed)
            executed.with_suffix(".html").write_text(to_html(document), encoding="utf-8")
    return executed


def _name(cell: nbformat.NotebookNode, cell_index: int) -> None:
    print(f"  {cell.source.splitlines()[0]}", flush=True)


def _show(cell: nbformat.NotebookNode, cell_index: int, execute_reply: object) -> None:
    for output in cell.outputs:
        if output.output_type == "stream":
            print(textwrap.indent(output.text.rstrip(), "    "), flush=True)


def keep(executed: Path, secrets: list[str]) -> None:
    """Put an executed notebook in the place of the one it was made of, cleaned.

    Raises:
        ValueError: an output names this machine, its user, a folder of it, or one of the secrets;
            nothing is written then.
    """
    document = cleaned(nbformat.read(executed, as_version=4))
    found = traces(document, secrets)
    if found:
        raise ValueError(f"{executed.name} is not kept, it has traces: {'; '.join(found)}")
    nbformat.write(document, FOLDER / executed.name)


def cleaned(document: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is kept: no state of widgets, no times, no colours of a terminal."""
    document.metadata = nbformat.from_dict(_METADATA)
    for cell in document.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [_ANSI.sub("", line) for line in output.traceback]
            for mime, text in output.get("data", {}).items():
                if isinstance(text, str):  # a frame of torch's: its file, from there on
                    output.data[mime] = _SITE.sub("", text)
    return document


def traces(document: nbformat.NotebookNode, secrets: list[str]) -> list[str]:
    """Where outputs tell of the machine they were made on: "cell 3: /home/..."; best empty."""
    folders = {str(ROOT), str(Path.home()), sys.prefix, tempfile.gettempdir() + "/"}
    words = {socket.gethostname(), getpass.getuser(), *folders} - {"/", "root"}
    patterns = [re.escape(word) for word in sorted(words)]
    patterns += [r"/(?:home|root|usr|work|tmp)/[^\s\"'<]+", r"site-packages", _ANSI.pattern]
    found = []
    for number, cell in enumerate(document.cells):
        text = "\n".join(_texts(cell.get("outputs", [])))
        for pattern in patterns:
            found += [f"cell {number}: {hit!r}" for hit in re.findall(pattern, text)[:1]]
        found += [f"cell {number}: a secret" for secret in secrets if secret in text]
    return found


def _texts(outputs: list[Any]) -> list[str]:
    """All that outputs say; pictures and packed scripts left out: by chance they spell anything."""
    found = []
    for output in outputs:
        found += [str(output.get("text", "")), *output.get("traceback", [])]
        data = output.get("data", {})
        found += [str(data[mime]) for mime in data if not mime.startswith("image/")]
    return [re.sub(r"[A-Za-z0-9+/=]{200,}", "", text) for text in found]


def to_html(document: nbformat.NotebookNode) -> str:
    """The notebook as one page that needs no network."""
    exporter = HTMLExporter(embed_images=True)
    # These would be loaded from the web; what the notebook shows is plain HTML and SVG.
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    exporter.widget_renderer_url = exporter.mermaid_js_url = ""
    page, _ = exporter.from_notebook_node(document)
    # The template's scripts for formulas and diagrams, of which there are none.
    return re.sub(r"<script[^>]*>(?:(?!</script>).)*</script>", "", str(page), flags=re.DOTALL)
