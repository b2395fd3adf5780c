"""How IPython shows our objects; what draws one is imported when one is shown. Client."""

from __future__ import annotations

import importlib
from typing import Any

from gpupool.notebook.page.front_end import in_notebook

# (module, type, what makes HTML of one, what makes text of one or "" for IPython's own way)
_SHOWN = (
    (
        "core.wire.events",
        "ValidationEvent",
        "monitor.result_view.validation_html",
        "monitor.result_view.validation_text",
    ),
    ("core.machine.gpus", "GpuTable", "gpu_view.gpu_table_html", ""),
    ("data.datastores.check", "CheckResult", "data_view.check_html", ""),
    ("data.datastores.preview", "Preview", "data_view.preview_html", ""),
    (
        "pool.variables.composite",
        "Composite",
        "composites.composite_html",
        "composites.composite_text",
    ),
    ("training.doctor", "Diagnosis", "monitor.doctor_view.diagnosis_html", ""),
    ("training.doctor", "Shares", "monitor.doctor_view.shares_html", ""),
    ("training.scaling", "Scaling", "monitor.doctor_view.scaling_html", ""),
    ("pool.status", "PoolStatus", "pool.bar.status_html", "pool.bar.status_text"),
    ("core.formatting", "Table", "page.markup.table_html", ""),
    ("training.confusion", "ConfusionMatrix", "monitor.confusion_view.confusion_html", ""),
    (
        "training.history",
        "TrainingHistory",
        "monitor.picture.history_html",
        "monitor.board.training_text",
    ),
    ("training.result", "TrainingResult", "monitor.result_view.result_html", ""),
    ("training.sweep.result", "SweepResult", "sweep_view.result_html", ""),
)
# (module, type, what shows one in a notebook: live, as no picture of one moment could)
_LIVE = (
    ("pool.pool", "Pool", "pool.pool_bar.show"),
    ("training.run", "TrainingRun", "monitor.views.show_again"),
)


def register(shell: Any) -> None:
    """Let IPython show them, whenever they come to be imported."""
    formatters = shell.display_formatter.formatters
    for module, name, html, text in _SHOWN:
        shown = f"gpupool.{module}", name
        # By name: IPython looks the type up when it shows one, so nothing is imported before.
        formatters["text/html"].for_type_by_name(*shown, lambda one, by=html: _made(by, one))
        if text:
            formatters["text/plain"].for_type_by_name(
                *shown, lambda one, printer, cycle, by=text: printer.text(_made(by, one))
            )
    if in_notebook():
        for module, name, show in _LIVE:
            shell.display_formatter.ipython_display_formatter.for_type_by_name(
                f"gpupool.{module}", name, lambda one, by=show: _of(by)(one)
            )
    # `x?` of anything else is IPython's own; the module is imported by the first Composite.
    shell.inspector.mime_hooks = {**shell.inspector.mime_hooks, "text/plain": _help}


def _help(data: Any) -> list[tuple[str, str]] | None:
    if type(data.obj).__name__ != "Composite":
        return None
    from gpupool.notebook.composites import composite_help

    return composite_help(data.obj)


def _made(by: str, value: object) -> str:
    return str(_of(by)(value))


def _of(by: str) -> Any:
    module, _, name = by.rpartition(".")
    return getattr(importlib.import_module(f"gpupool.notebook.{module}"), name)
