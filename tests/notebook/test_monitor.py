"""The live monitor in a real kernel, without a browser: what is sent, and what the file keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# The kernel runs in the root of the repository.
FEED = """
from gpupool.notebook.views import show_training
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
    assert output.data["text/html"].count('<svg xmlns="http://www.w3.org/2000/svg" viewBox') == 2
    assert "Finished: 3 epochs" in output.data["text/html"]
    assert output.data["text/plain"].startswith("Finished: 3 epochs in ")

    state = monitor_state(notebook)
    assert state["status"] == "finished"
    assert state["view"]["progress"] == 1.0
    assert dict(state["view"]["table"])["Training cycle"][1] == ["Step", "300 of 300"]
    lines = json.loads(state["lines"])
    assert len(lines["loss"]["raw"]) == 300
    assert len(lines["accuracy"]["validation"]) == 3


def test_while_it_runs_the_notebook_holds_the_widget_and_its_text() -> None:
    notebook = executed(
        "from gpupool.notebook.views import WidgetView\n"
        "run = Run(num_epochs=1, steps_per_epoch=4, num_steps=4)\n"
        "view = WidgetView(run.stop)\nrun.add_listener(view)",
        "run.wait()\nview.monitor",
    )
    assert WIDGET_VIEW in notebook.cells[1].outputs[0].data
    shown = notebook.cells[2].outputs[0].data
    assert WIDGET_VIEW in shown
    assert shown["text/plain"].startswith("training  epoch 1/1  step 4/4  loss ")


def test_stop_reaches_the_run_and_is_acknowledged_at_once() -> None:
    notebook = executed(
        "from gpupool.notebook.views import WidgetView\n"
        "run = Run(step_s=0.05)\nview = WidgetView(run.stop)\nrun.add_listener(view)",
        # As the kernel does it when the browser sends the press of the button:
        "view.monitor._handle_custom_msg({'press': 'stop'}, [])\n"
        "at_once = view.monitor.status\nrun.wait()",
        "print(at_once, run.history.status, view.monitor.status, len(run.history.steps) < 900)",
    )
    assert notebook.cells[3].outputs[0].text == "stopping stopped stopped True\n"
    assert "Stopped after step" in notebook.cells[1].outputs[0].data["text/html"]


def test_the_kernel_may_answer_on_any_shell() -> None:
    """Guards the private name of ipykernel 7.4 that the monitor removes after each message."""
    notebook = executed(
        "from gpupool.notebook.monitor import TrainingMonitor\n"
        "monitor = TrainingMonitor()\n"
        "after_open = '_reply_subshell_id' in vars(monitor.comm)\n"
        "monitor.update(TrainingHistory())\n"
        "print(after_open, '_reply_subshell_id' in vars(monitor.comm))"
    )
    assert notebook.cells[1].outputs[0].text == "False False\n"


def test_without_widgets_html_is_drawn_in_place() -> None:
    notebook = executed(
        "from gpupool.notebook.views import HtmlView\n"
        "run, view = Run(num_epochs=1, steps_per_epoch=20), HtmlView()\nrun.add_listener(view)",
        "run.wait()",
    )
    (output,) = notebook.cells[1].outputs
    assert "Finished: 1 epoch" in output.data["text/html"]


COUNT_MESSAGES = """
from gpupool.notebook.monitor import TrainingMonitor

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
"""


def test_at_most_ten_messages_a_second_and_no_point_lost() -> None:
    """1000 steps at 100 a second; only the clock is not real."""
    notebook = executed(
        COUNT_MESSAGES,
        "whole = [m for m in monitor.sent if 'lines' in m.get('state', ())]\n"
        "news = [m['content'] for m in monitor.sent if m['method'] == 'custom']\n"
        "steps = [p[0] for n in news for p in n['new']['loss']['raw']]\n"
        "print([len(news) + len(whole), len(whole), len(steps), steps == sorted(set(steps))])",
        "import json\nprint(max(len(json.dumps(n)) for n in news), monitor.lines)",
    )
    num_sent, num_whole, num_new, in_order = json.loads(
        notebook.cells[2].outputs[0].text.replace("True", "true")
    )
    assert 90 <= num_sent <= 10 * 10.1 + 2  # ten seconds, and one message for each new status
    assert num_whole == 6  # every two seconds and at the end
    assert num_new > 900  # the others came with one of the whole pictures
    assert in_order
    size, lines = notebook.cells[3].outputs[0].text.split(" ", 1)
    assert int(size) < 5000
    assert len(json.loads(lines)["loss"]["raw"]) <= 800


def test_the_browser_half_is_one_module_without_dependencies() -> None:
    source = (ROOT / "gpupool/notebook/static/monitor.js").read_text()
    assert "export default { render };" in source
    assert "import" not in source.split("export default")[0].replace("important", "")
    assert "http" not in source
