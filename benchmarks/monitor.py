"""What a point of a live plot costs the kernel, beside the usual ways to show one.

    python benchmarks/monitor.py [--rounds 5] [--points 40] [--lengths 1000,10000,100000]

All run in one real ipykernel, whose outputs nobody draws. Every way in turn shows new points of
the same training, after which it has so many; "CPU ms" is the process's CPU time a point (threads
that send included), the median over rounds, and each point is a message. Ours is called as in a
training of ten points a second, with the whole picture every five seconds. Trust the ratios. The
peers draw two curves, ours three in each of two plots, with tables and the strip of four ranks.

Messages a second: ours again, by the real clock, fed with 500 points a second for four seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from jupyter_client.manager import start_new_kernel

SETUP = """
import io, json, time, random
import ipywidgets, matplotlib
matplotlib.use("agg")
from matplotlib.figure import Figure
from tqdm.notebook import tqdm
from IPython.display import display
from gpupool.core.wire.events import RankEvent, StepEvent
from gpupool.notebook.monitor.curves import Curve
from gpupool.notebook.monitor.widget import TrainingMonitor
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events, rank_events

MAX_POINTS = 800

class Ours:
    def __init__(self, events):
        self.now, self.num_sent = 0.0, 0
        self.history, self.monitor = TrainingHistory(), TrainingMonitor(clock=lambda: self.now)
        display(self.monitor)
        for event in events:
            self.history.add(event)
        self.monitor.update(self.history)
    def add(self, event):
        self.now += 0.1
        if event.step % 10 == 0:
            for told in rank_events(4, event.step):
                self.history.add(told)
        self.history.add(event)
        self.monitor.update(self.history)

class Svg:
    def __init__(self, events):
        self.widget, self.curves = ipywidgets.HTML(), [Curve(MAX_POINTS), Curve(MAX_POINTS)]
        display(self.widget)
        for event in events:
            self.take(event)
    def take(self, event):
        if isinstance(event, StepEvent):
            self.curves[0].add(event.step, event.loss)
            self.curves[1].add(event.step, event.accuracy)
            self.last = event.step
    def add(self, event):
        self.take(event)
        lines = "".join(
            '<polyline fill="none" stroke="blue" points="%s"/>' % " ".join(
                f"{600 * step / self.last:.1f},{200 - 60 * value:.1f}"
                for step, value in curve.points())
            for curve in self.curves)
        self.widget.value = f'<svg viewBox="0 0 600 200">{lines}</svg>'

class Tqdm:
    def __init__(self, events):
        self.bar = tqdm(total=10**6, mininterval=0)
    def add(self, event):
        self.bar.set_postfix(loss=event.loss, accuracy=event.accuracy, refresh=False)
        self.bar.update(1)

class Matplotlib:
    def __init__(self, events):
        self.image = ipywidgets.Image()
        display(self.image)
        self.figure = Figure(figsize=(8, 5))
        self.axes = self.figure.subplots(2, 1)
        steps = [e for e in events if isinstance(e, StepEvent)]
        self.values = [[e.loss for e in steps], [e.accuracy for e in steps]]
        self.drawn = [axis.plot([])[0] for axis in self.axes]
    def add(self, event):
        for values, new in zip(self.values, (event.loss, event.accuracy)):
            values.append(new)
        for axis, line, values in zip(self.axes, self.drawn, self.values):
            line.set_data(range(len(values)), values)
            axis.relim()
            axis.autoscale_view()
        file = io.BytesIO()
        self.figure.savefig(file, format="png")
        self.image.value = file.getvalue()

WAYS = {"ours": Ours, "ipywidgets.HTML with SVG": Svg, "tqdm.notebook": Tqdm,
        "matplotlib, redrawn as PNG": Matplotlib}
try:
    import plotly.graph_objects as plotly
except ImportError:
    plotly = None
if plotly is not None:
    class Plotly:
        def __init__(self, events):
            steps = [e for e in events if isinstance(e, StepEvent)]
            self.values = [[e.loss for e in steps], [e.accuracy for e in steps]]
            self.figure = plotly.FigureWidget([plotly.Scatter(y=v) for v in self.values])
            display(self.figure)
        def add(self, event):
            for trace, values, new in zip(
                self.figure.data, self.values, (event.loss, event.accuracy)):
                values.append(new)
                trace.y = values
    WAYS["plotly FigureWidget"] = Plotly

def measure(length, rounds, points):
    events = list(full_events(num_epochs=max(1, length // 500), steps_per_epoch=500,
                              num_steps=length))
    shown = {name: way(events) for name, way in WAYS.items()}
    took = {name: [] for name in WAYS}
    step = length
    for _ in range(rounds):
        for name, way in shown.items():
            num = points if name != "matplotlib, redrawn as PNG" else max(2, points // 10)
            new = [StepEvent(step + n + 1, 1, 0.5 + random.random() / 9, 0.8, 0.1, 512,
                             (step + n) * 0.0125, 0.0005) for n in range(num)]
            began = time.process_time()
            for event in new:
                way.add(event)
            took[name].append(1000 * (time.process_time() - began) / num)
        step += points
    return took

def messages_a_second(seconds=4.0):
    class Counted(TrainingMonitor):
        num_sent = 0
        def _send(self, *args, **kwargs):
            self.num_sent += 1
            super()._send(*args, **kwargs)
    history, monitor = TrainingHistory(), Counted()
    display(monitor)
    began, before = time.monotonic(), monitor.num_sent
    for event in full_events(num_epochs=100):
        history.add(event)
        monitor.update(history)
        if time.monotonic() - began > seconds:
            break
        time.sleep(0.002)
    return (monitor.num_sent - before) / seconds
"""


def run(client: Any, code: str) -> Any:
    """The value of an expression in the kernel, or None of other code."""
    told: list[str] = []

    def on_output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            told.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=on_output, timeout=1800)
    if reply["content"]["status"] != "ok":
        raise RuntimeError("\n".join(reply["content"]["traceback"]))
    return json.loads("".join(told)) if told else None


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--lengths", default="1000,10000,100000")
    options = parser.parse_args()
    manager, client = start_new_kernel()
    try:
        run(client, SETUP)
        print("| way | points before | CPU ms a point | of ours |\n|---|---|---|---|")
        for length in map(int, options.lengths.split(",")):
            call = f"measure({length}, {options.rounds}, {options.points})"
            took = run(client, f"print(json.dumps({call}))")
            ours = statistics.median(took["ours"])
            for name, each in took.items():
                median = statistics.median(each)
                print(f"| {name} | {length} | {median:.2f} | {median / ours:.1f} |", flush=True)
        if not run(client, "print(json.dumps(plotly is not None))"):
            print("\nplotly is not installed and left out.")
        rate = run(client, "print(json.dumps(messages_a_second()))")
        print(f"\nmessages a second at 500 points a second: {rate:.1f}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()
