"""Drives a real JupyterLab in a headless Chromium.

with Lab(root) as lab, Browser() as browser:
    page = browser.open(lab, lab.write("t.ipynb", ["print(1)"]))
    page.run_cell(0)
    page.wait_idle()
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nbformat
from playwright.sync_api import Locator, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
# JupyterLab silently drops an execution that is asked for before the session is connected.
READY = "await nb.context.ready; await nb.context.sessionContext.ready; await nb.revealed;"
PENDING = """
const kernel = nb.context.sessionContext.session?.kernel;
const waiting = nb.content.widgets.filter(
    cell => cell.inputArea?.promptNode?.textContent?.includes('*'));
return waiting.length + (kernel?.status === 'idle' ? 0 : 1);"""


class Lab:
    """A JupyterLab server on loopback, with directories and settings of its own.

    `tmp` is an empty directory; kernels start with `pythonpath` on their path.
    """

    def __init__(self, tmp: Path, pythonpath: Path, settings: dict[str, Any] | None = None) -> None:
        self.tmp = tmp
        self._pythonpath = pythonpath
        self._settings = {**SETTINGS, **(settings or {})}
        self._token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def __enter__(self) -> Self:
        for name, values in self._settings.items():
            package, plugin = name.split(":")
            file = self.tmp / "settings" / package / f"{plugin}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        (self.tmp / "work").mkdir()
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
        command += [f"--port={self._port}", "--ServerApp.port_retries=0", "--allow-root"]
        command += [f"--ServerApp.root_dir={self.tmp / 'work'}", "--expose-app-in-browser"]
        with (self.tmp / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_up(timeout_s=60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in json.loads(self._request("/api/sessions")):
            self._request(f"/api/sessions/{session['id']}", "DELETE")
        os.killpg(self._process.pid, signal.SIGTERM)  # a process group of its own
        self._process.wait(20)

    def write(self, name: str, cells: list[str]) -> str:
        """Put a notebook of code cells into the server's folder."""
        kernel = {"name": "python3", "display_name": "Python 3"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})  # type: ignore[no-untyped-call]
        for source in cells:
            notebook.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
        nbformat.write(notebook, self.tmp / "work" / name)  # type: ignore[no-untyped-call]
        return name

    def url(self, notebook: str) -> str:
        """Where the notebook alone is shown, without side bars."""
        return f"http://127.0.0.1:{self._port}/doc/tree/{notebook}?token={self._token}"

    def _environment(self) -> dict[str, str]:
        """Nothing of the user's settings leaks in; the token is not in the argument list."""
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "run",
            "JUPYTER_DATA_DIR": "data",
            "IPYTHONDIR": "ipython",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
        }
        private = {name: str(self.tmp / folder) for name, folder in folders.items()}
        extra = {"JUPYTER_TOKEN": self._token, "PYTHONPATH": str(self._pythonpath)}
        return {**os.environ, **private, **extra}

    def _wait_until_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._request("/api/status")
                return
            except urllib.error.URLError:  # not listening yet
                if time.monotonic() > deadline or self._process.poll() is not None:
                    log = (self.tmp / "server.log").read_text()[-3000:]
                    raise RuntimeError(f"JupyterLab did not start:\n{log}") from None
                time.sleep(0.2)

    def _request(self, path: str, method: str = "GET") -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            method=method,
            headers={"Authorization": f"token {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=5) as reply:
            body: bytes = reply.read()
        return body


class Browser:
    """A Chromium without a screen."""

    def __enter__(self) -> Self:
        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=CHROMIUM_ARGS, headless=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._chromium.close()
        self._playwright.stop()

    def open(self, lab: Lab, notebook: str, width: int = 1200, height: int = 900) -> Page:
        """Open a notebook and wait until its cells can be run."""
        page = self._chromium.new_page(viewport={"width": width, "height": height})
        page.goto(lab.url(notebook), wait_until="domcontentloaded")
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=90_000)
        page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context", timeout=0)
        opened = Page(page)
        opened.js(READY)
        opened.wait_idle()
        return opened


class Page:
    """A notebook in the browser; `raw` is Playwright's own page."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def js(self, body: str, arg: object = None) -> Any:
        """Run JavaScript in which `app` is JupyterLab and `nb` the notebook."""
        head = "const app = window.jupyterapp, nb = app.shell.currentWidget;"
        return self.raw.evaluate(f"async (arg) => {{ {head} {body} }}", arg)

    def run_cell(self, index: int) -> None:
        """Run a cell, without waiting for it."""
        self.js(
            "nb.content.activeCellIndex = arg; nb.content.deselectAll();"
            "app.commands.execute('notebook:run-cell');",
            index,
        )

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Until the kernel is idle and no cell waits.

        The kernel's state alone does not tell: messages of widgets make it "idle" too.
        """
        deadline = time.monotonic() + timeout_s
        while self.js(PENDING):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the kernel is still busy after {timeout_s} s")
            self.raw.wait_for_timeout(100)

    def cell(self, index: int) -> Locator:
        """The element of a cell."""
        found: Locator = self.raw.locator(".jp-NotebookPanel .jp-Cell").nth(index)
        return found

    def use_dark_theme(self, dark: bool) -> None:
        """Switch JupyterLab's theme."""
        theme = "JupyterLab Dark" if dark else "JupyterLab Light"
        self.js("await app.commands.execute('apputils:change-theme', {theme: arg});", theme)
        self.raw.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=str(not dark).lower()
        )
