"""A real ipykernel, driven by messages as a front end does it: what a user sees, cell by cell."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from gpupool.notebook.page import progress_view

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TOOK = re.compile(r"\d+ ranks? · ✓ \d+ ok · [\d.]+ m?s")


@dataclass
class Cell:
    """A cell that has run: every message it published with its time, and its final outputs."""

    status: str = ""
    elapsed_s: float = 0.0
    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)  # that were asked of the user

    @property
    def drawn(self) -> list[dict[str, Any]]:
        """What each display was, and became, in order."""
        return [content["data"] for _, kind, content in self.messages if "display_data" in kind]

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """The outputs as a notebook keeps them: streams joined, updated displays in their place."""
        outputs: list[dict[str, Any]] = []
        for _, kind, content in self.messages:
            if kind == "update_display_data":
                wanted = content["transient"]["display_id"]
                for output in outputs:
                    if output.get("transient", {}).get("display_id") == wanted:
                        output.update(data=content["data"])
            elif kind == "stream" and outputs and outputs[-1].get("name") == content["name"]:
                outputs[-1]["text"] += content["text"]
            elif kind in ("stream", "display_data", "execute_result", "error"):
                outputs.append({"type": kind, **content})
        return outputs

    @property
    def number(self) -> int:
        return next(c["execution_count"] for _, kind, c in self.messages if kind == "execute_input")

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [output for output in self.outputs if output["type"] == "error"]

    @property
    def error_text(self) -> str:
        (error,) = self.errors
        return plain("\n".join(error["traceback"]))

    @property
    def html(self) -> str:
        return "\n".join(o["data"].get("text/html", "") for o in self.outputs if "data" in o)

    @property
    def text(self) -> str:
        """What a reader without HTML sees, errors and progress left out."""
        parts = [
            output["text"] if "text" in output else output["data"].get("text/plain", "")
            for output in without_progress(self.outputs)
            if output["type"] != "error"
        ]
        return plain("\n".join(part.rstrip("\n") for part in parts))


Condition = Callable[[Cell], bool]
Step = tuple[Condition, Callable[[], object]]


def draws(words: str) -> Condition:
    return lambda cell: any(
        words in data.get(f"text/{form}", "") for data in cell.drawn for form in ("plain", "html")
    )


def inherited() -> dict[str, str]:
    """The environment without pytest's variable, with which ipykernel leaves descriptors alone."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}


class Kernel:
    """A kernel with an empty profile of its own; a context manager.

    `variables` are added to its environment.
    """

    def __init__(self, **variables: str) -> None:
        self.manager = KernelManager()
        self._folder = tempfile.TemporaryDirectory(prefix="gpupool-test-")
        self._env = {**inherited(), "IPYTHONDIR": self._folder.name, **variables}

    @property
    def folder(self) -> str:
        return self._folder.name

    def __enter__(self) -> Self:
        self.manager.start_kernel(env=self._env)
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        self._folder.cleanup()

    def run(
        self,
        code: str,
        *,
        timeout_s: float = 100.0,
        meanwhile: Sequence[Step] = (),
        answers: Sequence[str | None] = (),
        allow_stdin: bool | None = None,
    ) -> Cell:
        """Run a cell to its end.

        `meanwhile` is done while it runs, one after the other: (condition, what), each once its
        condition is true of the cell so far; so nothing depends on how fast anything is.
        `answers` are typed, one after the other, where the cell asks for input; at None
        the user does not answer. Without `allow_stdin` nobody can be asked.
        """
        cell, left, steps = Cell(), list(answers), deque(meanwhile)
        sent = time.monotonic()
        request = self.client.execute(code, allow_stdin=allow_stdin)
        while True:
            now = time.monotonic()
            assert now - sent < timeout_s, f"the cell did not end within {timeout_s:.0f} s: {code}"
            if steps and steps[0][0](cell):
                steps.popleft()[1]()
            with contextlib.suppress(queue.Empty):
                question = self.client.get_stdin_msg(timeout=0)["content"]
                cell.questions.append(question["prompt"])
                assert left, f"the cell asks for more input than expected: {question['prompt']}"
                answer = left.pop(0)
                if answer is not None:
                    self.client.input(answer)
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            cell.messages.append((time.monotonic() - sent, kind, content))
            if kind == "status" and content["execution_state"] == "idle":
                break
        assert not steps, f"the cell ended before {len(steps)} steps were to be done: {cell.text}"
        cell.elapsed_s = time.monotonic() - sent
        cell.status = self._reply(request)["status"]
        return cell

    def press_stop(self) -> None:
        self.manager.interrupt_kernel()

    def _reply(self, request: str) -> dict[str, Any]:
        """The reply to a request; replies to earlier ones (of getting ready, say) are let go."""
        while True:
            message = self.client.get_shell_msg(timeout=60)
            if message["parent_header"].get("msg_id") == request:
                content: dict[str, Any] = message["content"]
                return content


def without_progress(outputs: Sequence[Any]) -> list[Any]:
    """Outputs but for those that say how long it took, which only come on a busy machine.

    They are lines about what lasted over a second, and what is left of the live view of an
    expression: its value has an output of its own.
    """
    sign = f'<div class="{progress_view.CLASS}"'
    return [
        output
        for output in outputs
        for data in [output.get("data", {})]
        if not data.get("text/html", "").startswith(sign)
        and ("execution_count" in output or not _TOOK.fullmatch(data.get("text/plain", "")))
    ]


def plain(text: str) -> str:
    return _ANSI.sub("", text)
