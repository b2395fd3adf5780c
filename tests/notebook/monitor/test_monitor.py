"""The live monitor in a real kernel, without a browser: what is sent, and what the file keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert.exporters import HTMLExporter, LatexExporter, MarkdownExporter

ROOT = Path(__file__).parents[3]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# The kernel runs in the root of the repository.
FEED = """
import json, time
from gpupool.notebook.monitor.views import show_training
from gpupool.notebook.monitor.widget import TrainingMonitor
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import Run, training_events
run = Run(num_epochs=3, steps_per_epoch=100)
show_training(run)
"""
AFTER_OPEN = """
monitor = TrainingMonitor()
after_open = "_reply_subshell_id" in vars(monitor.comm)
monitor.update(TrainingHistory())
print(after_open, "_reply_subshell_id" in vars(monitor.comm))
"""
COUNTED = """
class Counted(TrainingMonitor):
    sent = ()
    def _send(self, message, buffers=None):
        self.sent += (message,)
        super()._send(message, buffers)
now = 0.0
monitor, history = Counted(clock=lambda: now), TrainingHistory()
for event in training_events(num_epochs=10, steps_per_epoch=100):
    history.add(event)
    monitor.update(history)
    now += 0.01
whole = [m for m in monitor.sent if "view" in m.get("state", ())]
news = [m["content"] for m in monitor.sent if m["method"] == "custom"]
steps = [point[0] for one in news for point in one["new"]["loss"]["raw"]]
print(json.dumps({
    "sent": len(news) + len(whole), "whole": len(whole), "new": len(steps),
    "in order": steps == sorted(set(steps)), "size": max(len(json.dumps(n)) for n in news),
    "kept": len(json.loads(monitor.lines)["loss"]["raw"]),
}))
"""


@pytest.fixture(scope="module")
def notebook() -> Any:
    """One after its cells have run in a kernel."""
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(metadata=metadata)  # type: ignore[no-untyped-call]
    for source in (FEED, "run.wait()", AFTER_OPEN, COUNTED):
        notebook.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=60,
        store_widget_state=True,
        resources={"metadata": {"path": str(ROOT)}},
        on_notebook_start=lambda notebook: setattr(client.kc, "allow_stdin", True),  # as a page
    )
    client.execute()
    return notebook


def said(notebook: Any, index: int) -> str:
    return str(notebook.cells[index].outputs[0].text)


def assert_draws_two_plots(page: str) -> None:
    (data,) = re.findall('<img[^>]* src="data:image/svg\\+xml,([^"]+)"', page)
    drawn = unquote(data)
    assert drawn.startswith("<svg ")
    assert drawn.count("<polyline") == 6
    assert "best " in drawn


def test_the_saved_notebook_keeps_a_still_picture_and_no_widget(notebook: Any) -> None:
    (output,) = notebook.cells[0].outputs
    assert WIDGET_VIEW not in output.data
    assert "Finished: 3 epochs" in output.data["text/html"]
    assert_draws_two_plots(output.data["text/html"])
    assert output.data["text/plain"].startswith("Finished: 3 epochs in ")

    models = notebook.metadata["widgets"][WIDGET_STATE]["state"].values()  # for a page opened now
    state = next(m["state"] for m in models if m["model_name"] == "AnyModel")
    assert (state["status"], state["view"]["progress"]) == ("finished", 1.0)
    assert dict(state["view"]["table"])["Progress"][1] == ["Step", "300 of 300"]
    lines = json.loads(state["lines"])
    assert [len(lines["loss"]["raw"]), len(lines["accuracy"]["validation"])] == [300, 3]


def test_what_is_made_of_the_file_has_the_picture(notebook: Any) -> None:
    shown = nbformat.v4.new_notebook(cells=notebook.cells[:1])  # type: ignore[no-untyped-call]
    for exporter in (HTMLExporter, MarkdownExporter):
        page, _ = exporter().from_notebook_node(shown)
        assert "Finished: 3 epochs" in page
        assert_draws_two_plots(page)
    # an image in SVG beside the HTML would have to be converted by a program that may be missing
    paper, _ = LatexExporter().from_notebook_node(shown)
    assert "Finished: 3 epochs" in paper


def test_the_kernel_may_answer_on_any_shell(notebook: Any) -> None:
    """Guards the private name of ipykernel 7.4 that the monitor removes after each message."""
    assert said(notebook, 2) == "False False\n"


def test_at_most_ten_messages_a_second_and_no_point_lost(notebook: Any) -> None:
    """1000 steps at 100 a second; only the clock is not real."""
    counts = json.loads(said(notebook, 3))
    assert 90 <= counts["sent"] <= 10 * 10.1 + 2  # ten seconds, and one for each new status
    assert counts["whole"] == 3  # at the start, after five seconds, and at the end
    assert counts["new"] > 900  # the others came with one of the whole pictures
    assert counts["in order"]
    assert counts["size"] < 5000
    assert counts["kept"] <= 800
