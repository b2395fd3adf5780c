"""A notebook in a headless Chromium, driven through the front end's own commands.

Both front ends, JupyterLab and Notebook 7, have the same elements and the same commands.
"""

from __future__ import annotations

import re
import shutil
import time
from typing import Any, Self

import pytest
from playwright.sync_api import Locator, sync_playwright

from tests.browser.lab import App, Lab

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu"]
CELL = ".jp-NotebookPanel .jp-Cell"
# Notebook 7 has pages without a current widget for a moment.
OPENED = "() => window.jupyterapp?.shell?.currentWidget?.context?.sessionContext"
# JupyterLab silently drops an execution that is asked for before the session is connected.
READY = "await nb.context.ready; await nb.context.sessionContext.ready; await nb.revealed;"
PENDING = """
const kernel = nb.context.sessionContext.session?.kernel;
const waiting = nb.content.widgets.filter(
    cell => cell.inputArea?.promptNode?.textContent?.includes('*'));
return waiting.length + (kernel?.status === 'idle' ? 0 : 1);"""
# Until the front end shows that it runs, or has run.
RUN = """
nb.content.activeCellIndex = arg; nb.content.deselectAll();
let isOver = false;
app.commands.execute('notebook:run-cell').finally(() => { isOver = true; });
const prompt = nb.content.widgets[arg].inputArea.promptNode;
while (!isOver && !prompt.textContent.includes('*'))
    await new Promise(resolve => setTimeout(resolve, 10));"""
# Connected again after a reload; a busy kernel tells nothing more than that.
CONNECTED = """() => {
    const kernel = window.jupyterapp?.shell?.currentWidget?.context
        ?.sessionContext?.session?.kernel;
    return kernel?.connectionStatus === 'connected';
}"""

REOPEN = """path => window.jupyterapp.commands.execute('docmanager:open', {
    path, factory: 'Notebook', kernelPreference: {shouldStart: false, autoStartDefault: false}
}).then(() => null)"""


class Browser:
    """A Chromium without a screen. Pages share its cache: the second one opens faster."""

    def __enter__(self) -> Self:
        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=CHROMIUM_ARGS, headless=True
        )
        self._context = self._chromium.new_context()
        return self

    def __exit__(self, *_: object) -> None:
        self._chromium.close()
        self._playwright.stop()

    def open(self, lab: Lab, notebook: str, app: App = "lab") -> Page:
        """Open a notebook and wait until its cells can be run.

        A page can miss the message that says that its new kernel is idle: no cell has run yet,
        so a second look at the page costs nothing and asks the kernel again.
        """
        if app == "notebook":
            pytest.importorskip("notebook", reason="notebook is not installed")
        raw = self._context.new_page()
        raw.set_viewport_size({"width": 1200, "height": 900})
        raw.goto(lab.url(notebook, app), wait_until="domcontentloaded")
        page = Page(raw)
        page.wait_opened()
        try:
            page.wait_idle(30)
        except TimeoutError:
            raw.reload(wait_until="domcontentloaded")
            page.wait_opened()
            page.wait_idle()
        return page

    def begin(self, lab: Lab, name: str, cells: list[str], app: App = "lab") -> Page:
        page = self.open(lab, lab.write(name, cells), app=app)
        page.run_cell(0)
        page.wait_idle()
        return page

    def show(self, html: str, scripts: bool = True) -> Any:
        """A page of this HTML, which gets nothing from elsewhere; Playwright's own.

        What a script fails with is in `page.faults`.
        """
        context = self._context
        if not scripts:
            context = self._chromium.new_context(java_script_enabled=False)
        raw: Any = context.new_page()
        raw.faults = []
        raw.on("pageerror", lambda error: raw.faults.append(str(error)))
        raw.on("dialog", lambda dialog: raw.faults.append(dialog.message))
        raw.route(re.compile("^https?:"), lambda route: route.abort())
        raw.set_viewport_size({"width": 1200, "height": 1000})
        raw.set_content(html, wait_until="load", timeout=60_000)
        return raw

    def close_pages(self) -> None:
        for raw in self._context.pages:
            raw.close()


class Page:
    """A notebook in the browser; `raw` is Playwright's own page."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def js(self, body: str, arg: object = None) -> Any:
        """Run JavaScript in which `app` is the front end and `nb` the notebook."""
        head = "const app = window.jupyterapp, nb = app.shell.currentWidget;"
        return self.raw.evaluate(f"async (arg) => {{ {head} {body} }}", arg)

    def wait_opened(self, timeout_s: float = 90) -> None:
        self.raw.wait_for_selector(CELL, timeout=1000 * timeout_s)
        self.raw.wait_for_function(OPENED, timeout=1000 * timeout_s)
        self.js(READY)

    def run_cell(self, index: int) -> None:
        self.js(RUN, index)

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Until the kernel is idle and no cell waits.

        The kernel's state alone does not tell: messages of widgets make it "idle" too.
        """
        deadline = time.monotonic() + timeout_s
        while self.js(PENDING):
            if time.monotonic() > deadline:
                status = self.js("return nb.context.sessionContext.session?.kernel?.status;")
                raise TimeoutError(f"the kernel is still {status} after {timeout_s} s")
            self.raw.wait_for_timeout(100)

    def wait_for(self, condition: str, element: Locator, timeout_s: float = 60) -> None:
        handle = element.element_handle()
        self.raw.wait_for_function(condition, arg=handle, timeout=1000 * timeout_s)

    def cell(self, index: int) -> Locator:
        found: Locator = self.raw.locator(CELL).nth(index)
        return found

    def text(self, index: int) -> str:
        outputs = self.cell(index).locator(".jp-OutputArea-output")
        return "\n".join(outputs.all_inner_texts()).strip()

    def wait_text(self, index: int, words: str | re.Pattern[str]) -> None:
        """Until an output of a cell says this: what has come is drawn a moment later."""
        outputs = self.cell(index).locator(".jp-OutputArea-output")
        outputs.filter(has_text=words).first.wait_for(timeout=60_000)

    def wait_for_points(self, index: int) -> Locator:
        """The live monitor in the outputs of a cell, once its curves have points."""
        monitor = self.cell(index).locator(".gpm")
        canvas = monitor.locator("canvas").nth(1)
        canvas.wait_for(timeout=60_000)
        self.wait_for("canvas => Number(canvas.dataset.points) > 10", canvas)
        return monitor

    def interrupt(self) -> None:
        self.js("app.commands.execute('notebook:interrupt-kernel');")

    def save(self) -> None:
        self.js("await app.commands.execute('docmanager:save');")

    def reload(self) -> None:
        """Load the page anew, and wait until the notebook is drawn and its kernel connected.

        The kernel may be in the middle of a cell: what it runs goes on.
        """
        self.raw.reload(wait_until="domcontentloaded")
        self.raw.wait_for_selector(CELL, timeout=90_000)
        self.raw.wait_for_function(CONNECTED, timeout=90_000)

    def shut_kernel_down(self) -> None:
        self.js("await nb.context.sessionContext.shutdown();")

    def reopen_without_kernel(self, notebook: str) -> None:
        self.js("nb.dispose();")
        self.raw.evaluate(REOPEN, notebook)
        self.raw.wait_for_selector(CELL, timeout=90_000)
        self.raw.wait_for_function(OPENED, timeout=90_000)
        self.js("await nb.context.ready; await nb.revealed;")

    def resize(self, width: int, height: int = 900) -> None:
        self.raw.set_viewport_size({"width": width, "height": height})

    def use_dark_theme(self, dark: bool) -> None:
        theme = "JupyterLab Dark" if dark else "JupyterLab Light"
        self.js("await app.commands.execute('apputils:change-theme', {theme: arg});", theme)
        self.raw.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=str(not dark).lower()
        )
