"""How a view looks: pictures for people's eyes, and what a program can tell of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.page import Page

WIDTHS = (700, 1400)
HEIGHT = 1500  # what is higher than the window is cut in its picture
# Sizes settle, then one more frame is drawn.
SETTLED = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
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
    const told = e => e.tagName.toLowerCase() + (e.id ? '#' + e.id : '')
        + [...e.classList].map(c => '.' + c).join('') + ' ' + e.textContent.trim().slice(0, 40);
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


def cut_elements(element: Locator, may_scroll: bool) -> list[str]:
    """What of a view does not fit: tag, classes and text of each such element.

    With `may_scroll`, what can be scrolled to counts as fitting.
    """
    found: list[str] = element.evaluate(CUT, may_scroll)
    return found


def save_look(
    page: Page, element: Locator, folder: Path, name: str, dark: bool, width: int
) -> None:
    """Save `name_light_700.png` or its like, of a page that has this theme and width."""
    if not page.saves_looks:
        return
    page.raw.evaluate(SETTLED)
    theme = "dark" if dark else "light"
    element.screenshot(path=folder / f"{name}_{theme}_{width}.png")


def save_looks(page: Page, element: Locator, folder: Path, name: str) -> None:
    """Nothing of a view may be cut, at both widths; pictures of it, in both themes.

    The page is left light and wide.
    """
    for dark in (True, False) if page.saves_looks else (False,):
        page.use_dark_theme(dark)
        for width in WIDTHS:
            page.resize(width, HEIGHT)
            page.raw.wait_for_timeout(250)  # what is drawn after a resize is drawn by observers
            save_look(page, element, folder, name, dark, width)
            cut = cut_elements(element, may_scroll=False)
            assert not cut, f"{name} at {width} px, dark {dark}: cut {cut[:5]}"
