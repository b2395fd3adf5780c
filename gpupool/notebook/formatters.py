"""How IPython shows our objects; what draws one is imported when one is shown. Client."""

from __future__ import annotations

import importlib
from typing import Any

from gpupool.notebook.page.front_end import in_notebook

# What makes HTML of a type, and text where IPython's own way does not do.
_HTML = {
    "core.formatting.Table": "page.markup.table_html",
    "core.machine.gpus.GpuTable": "objects.gpu_table_html",
    "core.wire.events.ValidationEvent": "monitor.result_view.validation_html",
    "data.datastores.views.Preview": "objects.preview_html",
    "pool.status.PoolStatus": "pool_bar.bar_html",
    "training.inference.ConfusionMatrix": "monitor.result_view.confusion_html",
    "training.doctor.Diagnosis": "monitor.result_view.diagnosis_html",
    "training.doctor.Shares": "monitor.result_view.shares_html",
    "training.history.TrainingHistory": "monitor.picture.history_html",
    "training.result.TrainingResult": "monitor.result_view.result_html",
    "training.scaling.Scaling": "monitor.result_view.scaling_html",
    "training.sweep.SweepResult": "sweep.result_html",
}
_TEXT = {
    "core.wire.events.ValidationEvent": "monitor.result_view.validation_text",
    "pool.status.PoolStatus": "pool_bar.status_text",
    "pool.variables.composite.Composite": "objects.composite_text",
    "training.history.TrainingHistory": "monitor.words.training_text",
}
# What shows one in a notebook: live, as no picture of one moment could.
_LIVE = {
    "pool.pool.Pool": "pool_bar.show",
    "training.run.TrainingRun": "monitor.views.show_again",
}


def register(shell: Any) -> None:
    """Let IPython show them, whenever they come to be imported."""
    formatters = shell.display_formatter.formatters
    # By name: IPython looks the type up when it shows one, so nothing is imported before.
    for of, by in _HTML.items():
        formatters["text/html"].for_type_by_name(*_parts(of), lambda one, by=by: _call(by, one))
    for of, by in _TEXT.items():
        formatters["text/plain"].for_type_by_name(
            *_parts(of), lambda one, printer, cycle, by=by: printer.text(_call(by, one))
        )
    for of, by in _LIVE.items() if in_notebook() else ():
        shell.display_formatter.ipython_display_formatter.for_type_by_name(
            *_parts(of), lambda one, by=by: _call(by, one)
        )


def _parts(name: str) -> tuple[str, str]:
    module, _, name = name.rpartition(".")
    return f"gpupool.{module}", name


def _call(by: str, value: object) -> Any:
    module, name = _parts(f"notebook.{by}")
    return getattr(importlib.import_module(module), name)(value)
