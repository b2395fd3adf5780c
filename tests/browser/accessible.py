"""What axe-core finds fault with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.browser.page import Page

GRAVE = ("serious", "critical")


def grave_faults(page: Page, selector: str) -> list[str]:
    """The serious and critical violations in the elements of a selector: rule, element, why."""
    from axe_playwright_python.sync_playwright import Axe

    found: list[dict[str, Any]] = Axe().run(page.raw, selector).response["violations"]
    return [
        f"{rule['id']} {node['target']}: {node['html'][:160]} {node['failureSummary'][:240]}"
        for rule in found
        for node in rule["nodes"]
        if rule["impact"] in GRAVE
    ]
