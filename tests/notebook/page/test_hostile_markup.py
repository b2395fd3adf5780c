"""Markup in names, texts, errors and figures of others never becomes markup in what we draw."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import quote, unquote

import numpy as np
import pytest

from gpupool import ImageDatastore, Pool, SpmdError
from gpupool.core.progress import Progress
from gpupool.core.wire.events import MonitorEvent
from gpupool.notebook import objects, pool_bar
from gpupool.notebook.cells import views
from gpupool.notebook.cells.picture import errors_html, result_html
from gpupool.notebook.monitor import picture, result_view
from gpupool.notebook.monitor.curves import LoopHistory
from gpupool.notebook.monitor.picture import plots_script
from gpupool.notebook.page import markup, progress_view
from gpupool.training.inference import ConfusionMatrix
from tests.data.pictures import image_file

HOSTILE = (
    "\"'><img src=x onerror=alert(1)><script>alert(2)</script></style></title></pre></textarea>"
    "<svg onload=alert(3)>${alert(4)}{{5}}\u2028<!--\x1b]0;evil\x07\x1b[31m"
)
FILE = "\"'><img src=x onerror=alert(1)><svg onload=alert(3)>"  # a file's name has no slash
STATE = [("type", "application/json"), ("class", "gpupool-state")]  # data, which nothing runs
ACTIVE_TAGS = {"script", "iframe", "object", "embed", "link", "meta", "base", "form", "textarea"}


class Page(HTMLParser):
    """What of some HTML a browser would run or load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_tags = 0
        self.is_state = False
        self.feed(html.replace(plots_script(), ""))  # our own
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.num_tags += 1
        if (tag, attributes) == ("script", STATE):
            self.is_state = True
        elif tag in ACTIVE_TAGS:
            self.found.append(tag)
        for name, value in attributes:
            address = (value or "").strip().lower()
            if name.startswith("on") or "javascript:" in address:
                self.found.append(f"{tag} {name}={value}")
            if name == "src" and not address.startswith("data:image/"):
                self.found.append(f"{tag} {name}={value}")
            if name == "src" and address.startswith("data:image/svg+xml,"):
                self.found += Page(unquote((value or "").partition(",")[2])).found

    def handle_data(self, data: str) -> None:
        if self.is_state:
            json.loads(data)
            self.found += re.findall("[<\u2028\u2029]", data)

    def handle_endtag(self, tag: str) -> None:
        self.is_state = False

    def handle_comment(self, data: str) -> None:
        self.found.append(f"<!--{data}")


def assert_harmless(html: str) -> None:
    """No markup but ours is in a page, and it is a page."""
    page = Page(html)
    assert page.found == []
    assert page.num_tags > 0


def test_the_page_sees_what_a_browser_would_run() -> None:
    svg = quote("<svg onload=alert(1)></svg>")
    for html in (HOSTILE, f"<b>{FILE}", f'<img src="data:image/svg+xml,{svg}">'):
        assert Page(html).found != []


CELLS = {
    "a print that differs": "print(X, rank)",
    "a value": "X",
    "an error of one rank": "assert rank, X",
    "the name of an error": "raise type(X, (Exception,), {})('x')",
    "the file of a traceback": "exec(compile('1/0', X, 'exec'))",
    "a repr": "type('A', (), {'__repr__': lambda self: X})()",
    "an SVG": (
        "display({'image/svg+xml': '<svg onload=\"alert(1)\">' + X + '</svg>', 'text/plain': X}, "
        "raw=True)"
    ),
    "metadata of a picture": (
        "display({'image/png': 'AAAA', 'text/plain': X}, raw=True, "
        "metadata={'image/png': {'width': X, 'height': X, 'needs_background': X}})"
    ),
    "what is displayed by name": "display({X: X, 'image/png': X, 'text/plain': X}, raw=True)",
}


@pytest.mark.parametrize("what", CELLS)
def test_cells(pool2: Pool, what: str) -> None:
    source = f"from IPython.display import display\nX = {HOSTILE!r}\n{CELLS[what]}"
    try:
        html = result_html(pool2.run(source, timeout_s=60))
    except SpmdError as error:
        html = "".join(errors_html(error))
    assert_harmless(html)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageDatastore:
    """Images of two classes; names of a class and of files are hostile, and one is damaged."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("a", f"b{FILE}"):
        (folder / name).mkdir()
        for n in range(3):
            (folder / name / f"{n}{FILE}.png").write_bytes(image_file(20 * n, (8, 8)))
    (folder / "a" / f"bad{FILE}\x1b]0;evil\x07\n.png").write_text(f"no image{HOSTILE}")
    return ImageDatastore(str(folder))


def test_data_sets(data: ImageDatastore) -> None:
    assert_harmless(objects.preview_html(data.preview()))
    assert_harmless(markup.table_html(data.check()))


@pytest.mark.parametrize("num_classes", [2, 60])
def test_a_confusion_matrix(num_classes: int) -> None:
    counts = np.ones((num_classes, num_classes), int)
    classes = tuple(f"{HOSTILE}{n}" for n in range(num_classes))
    assert_harmless(result_view.confusion_html(ConfusionMatrix(counts, classes)))


def test_bars_and_notices() -> None:
    bar = Progress(HOSTILE, 3, HOSTILE, elapsed_s=1.0)
    bar.update(1)
    bar.tell(HOSTILE)
    assert_harmless(progress_view.bar_html(bar))
    assert_harmless(views.notice_html(HOSTILE))


def test_a_monitor() -> None:
    rows = [(step, 0.1 * step, {HOSTILE: 1.0 * step}) for step in (1, 2)]
    groups, info = {HOSTILE: [HOSTILE]}, {HOSTILE: HOSTILE}
    event = MonitorEvent(1, HOSTILE, 9, 2, groups, info, "running", True, 2.0, rows)
    history = LoopHistory(event)
    history.add(event)
    assert_harmless(picture.history_html(history))
    shown = picture.board_of(history)
    assert_harmless(picture.live_html(shown, picture.image_of(shown), lambda _name, part, _c: part))
    assert_harmless(picture.header(shown.lost, None, "", is_failed=True))
    history.end()
    assert "gpupool-state" in picture.history_html(history)
    assert_harmless(picture.history_html(history))


def test_the_pool(pool2: Pool) -> None:
    status = pool2.status()
    odd = {"reason": HOSTILE, "credentials": HOSTILE, "why_cpu": HOSTILE, "env": {HOSTILE: HOSTILE}}
    for state in ("idle", "busy", "broken"):
        assert_harmless(pool_bar.bar_html(replace(status, state=state, **odd)))  # type: ignore[arg-type]
