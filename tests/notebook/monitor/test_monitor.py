"""The live monitor in a real kernel, without a browser: what is sent, and what the file keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# The kernel runs in the root of the repository.
FEED = """
from gpupool.notebook.monitor.views import show_training
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import Run, training_events
"""


def executed(*cells: str) -> Any:
    """The notebook after its cells have run in a kernel."""
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(metadata=metadata)  # type: ignore[no-untyped-call]
    for source in (FEED, *cells):
        cell = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]
        notebook.cells.append(cell)
    client = NotebookClient(
        notebook,
        timeout=60,
        store_widget_state=True,
        resources={"metadata": {"path": str(ROOT)}},
        on_notebook_start=lambda notebook: setattr(client.kc, "allow_stdin", True),  # as a page
    )
    client.execute()
    return notebook


def monitor_state(notebook: Any) -> dict[str, Any]:
    """What a page opened now would know of the widget."""
    models = notebook.metadata["widgets"][WIDGET_STATE]["state"].values()
    (state,) = [m["state"] for m in models if m["model_name"] == "AnyModel"]
    return dict(state)


def test_the_saved_notebook_keeps_a_still_picture_and_no_widget() -> None:
    notebook = executed(
        "run = Run(num_epochs=3, steps_per_epoch=100)\nshow_training(run)",
        "run.wait()",
    )
    (output,) = notebook.cells[1].outputs
    assert WIDGET_VIEW not in output.data
    assert "data:image/svg+xml," in output.data["text/html"]
    assert "Finished: 3 epochs" in output.data["text/html"]
    assert output.data["text/plain"].startswith("Finished: 3 epochs in ")

    state = monitor_state(notebook)
    assert state["status"] == "finished"
    assert state["view"]["progress"] == 1.0
    assert dict(state["view"]["table"])["Training cycle"][1] == ["Step", "300 of 300"]
    lines = json.loads(state["lines"])
    assert len(lines["loss"]["raw"]) == 300
    assert len(lines["accuracy"]["validation"]) == 3


def test_the_kernel_may_answer_on_any_shell() -> None:
    """Guards the private name of ipykernel 7.4 that the monitor removes after each message."""
    notebook = executed(
        "from gpupool.notebook.monitor.widget import TrainingMonitor\n"
        "monitor = TrainingMonitor()\n"
        "after_open = '_reply_subshell_id' in vars(monitor.comm)\n"
        "monitor.update(TrainingHistory())\n"
        "print(after_open, '_reply_subshell_id' in vars(monitor.comm))"
    )
    assert notebook.cells[1].outputs[0].text == "False False\n"


COUNTED = """
from gpupool.notebook.monitor.widget import TrainingMonitor

class Counted(TrainingMonitor):
    sent = ()
    def _send(self, message, buffers=None):
        self.sent += (message,)
        super()._send(message, buffers)
"""
COUNT_MESSAGES = """
now = 0.0
monitor, history = Counted(clock=lambda: now), TrainingHistory()
for event in training_events(num_epochs=10, steps_per_epoch=100):
    history.add(event)
    monitor.update(history)
    now += 0.01
"""


def test_at_most_ten_messages_a_second_and_no_point_lost() -> None:
    """1000 steps at 100 a second; only the clock is not real."""
    notebook = executed(
        COUNTED + COUNT_MESSAGES,
        "whole = [m for m in monitor.sent if 'view' in m.get('state', ())]\n"
        "news = [m['content'] for m in monitor.sent if m['method'] == 'custom']\n"
        "steps = [p[0] for n in news for p in n['new']['loss']['raw']]\n"
        "print([len(news) + len(whole), len(whole), len(steps), steps == sorted(set(steps))])",
        "import json\nprint(max(len(json.dumps(n)) for n in news), monitor.lines)",
    )
    num_sent, num_whole, num_new, in_order = json.loads(
        notebook.cells[2].outputs[0].text.replace("True", "true")
    )
    assert 90 <= num_sent <= 10 * 10.1 + 2  # ten seconds, and one message for each new status
    assert num_whole == 3  # at the start, after five seconds, and at the end
    assert num_new > 900  # the others came with one of the whole pictures
    assert in_order
    size, lines = notebook.cells[3].outputs[0].text.split(" ", 1)
    assert int(size) < 5000
    assert len(json.loads(lines)["loss"]["raw"]) <= 800


# All within a tenth of a second; then nothing more is reported for as long as this waits.
LAST_NEWS = """
import json, time
monitor, history = Counted(lost_picture=lambda h: h.line()), TrainingHistory()
for event in training_events(num_epochs=1, steps_per_epoch=50, num_steps=20):
    history.add(event)
    monitor.update(history)
at_once = len(json.loads(monitor.lines)["loss"]["raw"])
def sent():
    views = [m["content"]["view"] for m in monitor.sent if m["method"] == "custom"]
    return {
        "words": any("20 of 50" in json.dumps(view) for view in views),
        "points": len(json.loads(monitor.lines)["loss"]["raw"]),  # of a page that is opened later
        "kept": "step 20/50" in monitor.lost.get("data", ""),
    }
deadline = time.monotonic() + 30
while sent() != {"words": True, "points": 20, "kept": True} and time.monotonic() < deadline:
    time.sleep(0.02)
print(at_once < 20, sent())
"""


@pytest.mark.long
def test_the_last_news_follows_where_nothing_comes_after_it() -> None:
    """Points and words within half a second, then the whole picture and that for a dead kernel."""
    notebook = executed(COUNTED, LAST_NEWS)
    assert notebook.cells[2].outputs[0].text == (
        "True {'words': True, 'points': 20, 'kept': True}\n"
    )


def test_the_browser_half_is_one_module_without_dependencies() -> None:
    from gpupool.notebook.monitor.widget import TrainingMonitor

    source = str(TrainingMonitor._esm)
    assert source.count("export default") == 1
    assert "import" not in source
    assert "http" not in source.replace('xmlns="http://www.w3.org/2000/svg"', "")
