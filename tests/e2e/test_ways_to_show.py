"""Ways to show a secret, beside those of `test_secrets.py`, and what a reader of the cell sees."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import gpupool
from gpupool import Pool, SpmdError
from gpupool.notebook.cells.picture import errors_html, result_html, result_text
from gpupool.pool import session
from tests.support.environment import environment
from tests.support.processes import until

CANARY = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"  # as AWS shows one in its pages
LINES = "first-line-of-key-000\nsecond-line-of-key-111"
ENDS_IN_A_LINE = "tok-with-newline-222\n"
WINDOW = 12  # so many characters of a secret in a row are a leak

MASKED = {
    "in halves, flushed": "print(K[:20], end='', flush=True); time.sleep(.3); print(K[20:])",
    "by character": "for c in K: sys.stdout.write(c); sys.stdout.flush()",
    "write(2) in halves": "os.write(2, A.encode()); time.sleep(.3); os.write(2, B.encode()); None",
    "a note of an error": "e = ValueError(1); e.__notes__ = [K]; raise e",
    "a warning": "import warnings; warnings.warn(K)",
    "a key of a value": "{'a': K, K: 1}",
    "a value in JSON": "display(JSON({'a': [K]}))",
    "a key of metadata": "display({'text/plain': 'x'}, metadata={'m': {K: 1}}, raw=True)",
    "drawn over": "print('junk' + chr(13) + K)",
    "base64": "print(base64.b64encode(K.encode()).decode())",
    "a header": "print('Authorization: Basic', base64.b64encode(b'ada:' + K.encode()).decode())",
    "a thread after the cell": "threading.Thread(target=late, args=(K,)).start()",
    "the end of a program": (
        "subprocess.run([sys.executable, '-c', 'import os; "
        'raise SystemExit(os.environ["AWS_SECRET_ACCESS_KEY"])\']); None'
    ),
    "a monitor": (
        "for i in (m := gpupool.monitor(9, title=K, info={'a': K, K: 'b'})): m.log(loss=1.0)"
    ),
    "a frame of a traceback": "def f(secret):\n    return 1 / 0\nf(K)",
    "a line of a value": "print(os.environ['TWO_LINE_KEY'].splitlines()[0])",
    "a value without its line end": "print('<', os.environ['NL_TOKEN'].strip(), '>')",
    "a progress bar": "from tqdm import tqdm\nfor _ in tqdm(range(3), desc=K): pass",
}
SETUP = """
import base64, os, subprocess, sys, threading, time, gpupool
from IPython.display import JSON, display
K = os.environ["AWS_SECRET_ACCESS_KEY"]
A, B = K[:20], K[20:]
def late(text):
    time.sleep(0.3); print(text); print("late is over")
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    session.stop()
    secrets = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": CANARY}
    secrets |= {"TWO_LINE_KEY": LINES, "NL_TOKEN": ENDS_IN_A_LINE}
    with environment({**os.environ, **secrets}):
        pool = gpupool.start(n=1, device="cpu", env=list(secrets))
    with pool:
        pool.run(SETUP)
        yield pool


def windows() -> Iterator[str]:
    """Each piece of a secret that would be a leak, in each form in which it could be one."""
    octets = CANARY.encode()
    texts = [CANARY, *LINES.split("\n"), ENDS_IN_A_LINE.strip()]
    texts += [base64.b64encode(b"x" * n + octets).decode()[n + 2 : -3] for n in range(3)]
    for text in texts:
        bare = squeezed(text)
        yield from (bare[n : n + WINDOW] for n in range(len(bare) - WINDOW + 1))


def squeezed(text: str) -> str:
    """What a reader sees: no markup, no codes, no erased letters, nothing between the letters."""
    text = html.unescape(re.sub("<[^>]*>", "", text))
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\\u001b\[[0-9;]*[A-Za-z]|.\x08|.\\b", "", text)
    return re.sub("[^A-Za-z0-9]", "", text.replace("%252F", "/").replace("%2f", "/"))


def seen(pool: Pool, code: str) -> str:
    """All that the notebook has of a cell: text, figures, value, error, and how they are drawn."""
    try:
        result = pool.run(code, timeout_s=60)
    except SpmdError as error:
        whole = [str(error), repr(error), *traceback.format_exception(error), *errors_html(error)]
        return " ".join([*whole, *(each.traceback for each in error.errors.values())])
    if "late" in code:
        until(lambda: "late is over" in result.text(0), 5, "the thread's end")
    drawn: list[Any] = [
        result.text(0),
        json.dumps(result.outputs[0].displays),
        result.value_text(0),
    ]
    return " ".join([*map(str, drawn), result_html(result), result_text(result), repr(result)])


@pytest.mark.parametrize("way", MASKED)
def test_no_part_of_a_secret_is_shown(pool: Pool, way: str) -> None:
    text = squeezed(seen(pool, MASKED[way]))
    assert [piece for piece in windows() if piece in text] == []
    assert "hidden" in text or way in ("a monitor", "a frame of a traceback")
