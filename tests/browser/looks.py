"""What a program can tell of how a view looks: what is cut, and what axe-core finds fault with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.page import Page

WIDTHS = (700, 1400)
HEIGHT = 1500
GRAVE = ("serious", "critical")
# Elements under `root` whose content is wider than they are, and those that end right of the cell
# they are in; what scrolls sideways may do so where that is allowed.
CUT = """(root, mayScroll) => {
    const scrolls = e => mayScroll && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
    const inScroller = e => {
        for (let p = e.parentElement; p && p !== root.parentElement; p = p.parentElement)
            if (scrolls(p)) return true;
        return false;
    };
    // "a long na…", the whole of which is shown by the pointer
    const shortened = e => getComputedStyle(e).textOverflow === 'ellipsis' && e.title;
    const told = e => e.tagName.toLowerCase() + [...e.classList].map(c => '.' + c).join('')
        + ' ' + e.textContent.trim().slice(0, 40);
    const right = (root.closest('.jp-OutputArea') ?? document.body).getBoundingClientRect().right;
    return [root, ...root.querySelectorAll('*')].filter(e => {
        const box = e.getBoundingClientRect();
        if (!box.width || !box.height || e.closest('svg')) return false;
        if (inScroller(e) || shortened(e)) return false;
        const wide = e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !scrolls(e)
            && getComputedStyle(e).display !== 'inline';
        return wide || box.right > right + 1;
    }).map(told);
}"""


def cut_elements(element: Locator, may_scroll: bool = False) -> list[str]:
    """What of a view does not fit: tag, classes and text of each such element.

    With `may_scroll`, what can be scrolled to counts as fitting.
    """
    found: list[str] = element.evaluate(CUT, may_scroll)
    return found


def grave_faults(page: Page, selector: str) -> list[str]:
    """The serious and critical violations in the elements of a selector: rule, element, why."""
    reason = "axe-core is not installed"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason)
    found: list[dict[str, Any]] = axe.Axe().run(page.raw, selector).response["violations"]
    return [
        f"{rule['id']} {node['target']}: {node['html'][:160]} {node['failureSummary'][:240]}"
        for rule in found
        for node in rule["nodes"]
        if rule["impact"] in GRAVE
    ]


def assert_looks_well(page: Page, view: Locator, selector: str, may_scroll: bool = False) -> None:
    """Nothing of a view is cut, at both widths; nothing of a selector is inaccessible, in both
    themes. The page is left light and wide."""
    for width in WIDTHS:
        page.resize(width, HEIGHT)
        page.raw.wait_for_timeout(250)  # what is drawn after a resize is drawn by observers
        assert cut_elements(view, may_scroll) == [], f"at {width} px"
    for dark in (True, False):
        page.use_dark_theme(dark)
        assert grave_faults(page, selector) == [], f"dark {dark}"
