"""How IPython shows our objects; what draws one is imported when one is shown. Client."""

from __future__ import annotations

import importlib
from typing import Any

_COMPOSITE_TEXT = "composite_view.composite_text"
# (module, type, what makes HTML of one, what makes text of one or "" for IPython's own way)
_SHOWN = (
    ("core.gpu_table", "GpuTable", "gpu_view.gpu_table_html", "gpu_view.gpu_table_text"),
    ("core.plan", "TrainingPlan", "plan_view.plan_html", ""),
    ("data.check", "CheckResult", "data_view.check_html", ""),
    ("data.preview", "Preview", "data_view.preview_html", ""),
    (
        "pool.composite",
        "Composite",
        "composite_view.composite_html",
        "composite_view.composite_text",
    ),
    ("pool.leftovers", "Leftovers", "pool_view.leftovers_html", "pool_view.leftovers_text"),
    ("pool.status", "PoolStatus", "bar_view.status_html", "bar_view.status_text"),
    ("training.confusion", "ConfusionMatrix", "confusion_view.confusion_html", ""),
    ("training.result", "TrainingPlot", "picture.plot_html", "picture.plot_text"),
    ("training.result", "TrainingResult", "result_view.result_html", ""),
)


def register(shell: Any) -> None:
    """Let IPython show them, whenever they come to be imported."""
    formatters = shell.display_formatter.formatters
    for module, name, html, text in _SHOWN:
        shown = f"gpupool.{module}", name
        formatters["text/html"].for_type_by_name(*shown, lambda one, by=html: _made(by, one))
        if text:
            formatters["text/plain"].for_type_by_name(
                *shown, lambda one, printer, cycle, by=text: printer.text(_made(by, one))
            )


def _made(by: str, value: object) -> str:
    module, _, name = by.partition(".")
    return str(getattr(importlib.import_module(f"gpupool.notebook.{module}"), name)(value))
