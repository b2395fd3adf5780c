"""What a frame of the live monitor costs the page, and whether its memory grows.

    python benchmarks/monitor_page.py [--frames 300] [--minutes 60]

The browser's half of the monitor in a headless Chromium, fed by hand with what the kernel would
send: accuracy, loss and 12 metrics, 16 ranks, curves at their full length. "Script" is what the
browser counts as script (CDP, `Performance.getMetrics`, CPU time of the page's thread) over all
frames, divided by them; words come with each fifth message, as the kernel sends them twice a
second. Memory is that of the heap after a collection, while ten messages a second of so many
minutes pass, and the whole picture each 5 s.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from playwright.sync_api import sync_playwright

from gpupool.core.wire.events import StartEvent, ValidationEvent
from gpupool.notebook.monitor.picture import state_of
from gpupool.notebook.monitor.widget import MAX_POINTS, TrainingMonitor
from gpupool.training.history import TrainingHistory
from tests.browser.page import CHROMIUM, CHROMIUM_ARGS
from tests.notebook.feed import full_events

METRICS = tuple(f"metric {n}" for n in range(12))
MESSAGES_A_WHOLE = 50
FEED = """
const listeners = {}, state = given.state;
const model = {
  get: (name) => state[name],
  on: (name, listener) => { (listeners[name] ??= []).push(listener); },
  off: () => {}, send: () => {}, save_changes: () => {},
};
const monitor = made.default();
monitor.initialize?.({ model });
monitor.render({ model, el: document.querySelector("main") });
const say = (name, about) => (listeners[name] ?? []).forEach((one) => one(about));
window.message = (step) => {
  const point = [[step, 0.5 + 0.1 * Math.random()]], mean = [[...point[0], 1]];
  const new_ = { raw: point, mean };
  const { ranks, table } = state.view, words = structuredClone({ ranks, table });
  say("msg:custom", { view: step % 5 ? {} : words, new: { accuracy: new_, loss: new_ } });
};
window.whole = () => {
  state.view = structuredClone(state.view);
  state.lines = `${state.lines} `;
  say("change:view");
  say("change:lines");
};
window.frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
"""


def state() -> dict[str, Any]:
    """What the kernel sends to a page that is opened in the middle of a long training."""
    history = TrainingHistory()
    for event in full_events(num_epochs=100, steps_per_epoch=200, num_ranks=16, num_steps=12_000):
        if isinstance(event, StartEvent):
            event = replace(event, metrics=METRICS)
        if isinstance(event, ValidationEvent):
            event = replace(event, metrics=dict.fromkeys(METRICS, event.loss))
        history.add(event)
    made = state_of(history, MAX_POINTS)
    return {"view": made.view, "lines": made.lines(), "status": "training", "still": {}}


def measure(page: Any, frames: int, minutes: float) -> None:
    """Print the table."""
    cdp = page.context.new_cdp_session(page)
    cdp.send("Performance.enable", {"timeDomain": "threadTicks"})

    def metrics() -> dict[str, float]:
        found = cdp.send("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in found}

    def heap_mb() -> float:
        cdp.send("HeapProfiler.collectGarbage")
        return metrics()["JSHeapUsedSize"] / 2**20

    feed = "async ([from, count]) => { for (let n = from; n < from + count; n++) { %s } }"
    page.evaluate(feed % "message(n); await frame();", [12_000, 20])
    before = metrics()
    page.evaluate(feed % "message(n); await frame();", [12_020, frames])
    after = metrics()
    spent = {name: 1000 * (after[name] - before[name]) / frames for name in after}
    print("| | |\n|---|---|")
    print(f"| script a frame, ms | {spent['ScriptDuration']:.2f} |")
    layout = spent["LayoutDuration"] + spent["RecalcStyleDuration"]
    print(f"| layout and style a frame, ms | {layout:.2f} |")
    heaps = []
    wholes = int(60 * minutes * 10 / MESSAGES_A_WHOLE)
    for part in range(5):
        if part:
            code = f"for (let m = 0; m < {MESSAGES_A_WHOLE}; m++) message(n * 50 + m);"
            page.evaluate(feed % f"{code} whole(); await frame();", [1000 * part, wholes // 4])
        heaps.append(heap_mb())
    shown = ", ".join(f"{heap:.1f}" for heap in heaps)
    print(f"| heap at 0, 1/4, ... of {minutes:g} minutes, MB | {shown} |")


def main() -> None:
    """Open a page with the monitor, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.on("pageerror", lambda error: print("error:", error))
        page.set_content(f"<style>{TrainingMonitor._css}</style><main></main>")
        code = json.dumps(str(TrainingMonitor._esm))
        page.evaluate(
            f"async (given) => {{ const blob = new Blob([{code}], {{ type: 'text/javascript' }});"
            f"const made = await import(URL.createObjectURL(blob)); {FEED} }}",
            {"state": state()},
        )
        measure(page, options.frames, options.minutes)
        browser.close()


if __name__ == "__main__":
    main()
