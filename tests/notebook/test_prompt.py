"""A line that is drawn while IPython is used on a real terminal: below the prompt, above prints."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from gpupool.core.terminal import FRESH_LINE

DEADLINE_S = 60.0
ASKS_FOR_CURSOR = "\x1b[6n"
BEGIN = """
import sys, threading, time
from gpupool.core.terminal import DrawnLine
from gpupool.notebook import prompt
line, over = DrawnLine(sys.stderr), threading.Event()
print("may draw", prompt.shares_screen())
def draw():
    number = 0
    while not over.wait(0.05):
        number += 1
        line.draw(f"drawn {number}")
    line.close()
def seen():
    while not line._shown:
        time.sleep(0.01)
thread = threading.Thread(target=draw)
thread.start()
"""


class Screen:
    """IPython on a terminal that answers where its cursor is; `text` is all it has written."""

    def __init__(self, folder: Path, *options: str) -> None:
        script = folder / "begin.py"
        script.write_text(BEGIN)
        args = ["-m", "IPython", "--no-banner", "--colors=NoColor", *options]
        env = {**os.environ, "TERM": "xterm-256color", "IPYTHONDIR": str(folder)}
        self.child = pexpect.spawn(
            sys.executable, args, env=env, dimensions=(30, 100), encoding="utf-8"
        )
        self.text = ""

    def until(self, pattern: str, since: int = 0) -> str:
        """What was written from `since` on, once this is in it."""
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.text[since:]):
            assert time.monotonic() < deadline, self.text[since:]
            try:
                piece = self.child.read_nonblocking(4096, 0.1)
            except pexpect.TIMEOUT:
                continue
            self.text += piece
            for _ in range(piece.count(ASKS_FOR_CURSOR)):
                self.child.send("\x1b[5;1R")
        return self.text[since:]

    def close(self) -> None:
        """End it, whatever it does; `close` of pexpect gives a process a tenth of a second."""
        if self.child.isalive():
            self.child.kill(signal.SIGKILL)
            self.child.wait()
        self.child.close()

    def run(self, number: int, code: str) -> int:
        """Type a cell at its prompt, and tell where in `text` what follows begins."""
        self.until(rf"In \[{number}\]:")
        since = len(self.text)
        self.child.send(code + "\r")
        return since


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    made = Screen(tmp_path)
    yield made
    made.close()


def test_a_line_is_below_the_prompt_and_what_cells_print_above_it(
    screen: Screen, tmp_path: Path
) -> None:
    screen.run(1, f"%run -i {tmp_path}/begin.py")
    screen.until("may draw True")
    screen.until(r"In \[2\]:")
    at_prompt = screen.text.index("In [2]:")
    # below the prompt; later only those digits are written that are others
    shown = screen.until(r"drawn \d+(.|\n)*\x1b", since=at_prompt)
    assert FRESH_LINE + "drawn" not in shown  # the prompt draws it

    since = screen.run(2, "for i in range(4): print('mine', i); seen()")
    shown = screen.until(r"mine 3\r\n", since)
    begun = shown[shown.index("mine 0") :]
    assert FRESH_LINE + "drawn" in begun
    # each print begins a line of its own
    assert not re.search(r"drawn \d+[^\x1b\r]*mine", begun)
    assert all(f"{FRESH_LINE}mine {i}" in begun for i in (1, 2, 3))

    since = screen.run(3, "over.set(); thread.join(); print('left', type(sys.stdout).__name__)")
    screen.until("left TextIOWrapper", since)
    screen.run(4, "exit()")


def test_a_simple_prompt_could_not_be_drawn_anew_so_nothing_is_drawn(tmp_path: Path) -> None:
    screen = Screen(tmp_path, "--simple-prompt")
    try:
        screen.run(1, f"%run -i {tmp_path}/begin.py")
        screen.until("may draw False")
    finally:
        screen.close()
