"""What a page that is loaded again gets from a model of ours, in a real kernel."""

from __future__ import annotations

import queue
import time
from typing import Any

from tests.notebook.kernel import Kernel

# A thread sends one trait after the other, whatever the kernel's main thread does.
MONITOR = """
import threading, time
from gpupool.notebook.monitor.widget import TrainingMonitor
monitor, is_over = TrainingMonitor(), threading.Event()
def send():
    number = 0
    while not is_over.wait(0.001):
        monitor.lost = {"model_id": monitor.model_id, "number": (number := number + 1)}
thread = threading.Thread(target=send)
thread.start()
print(monitor.comm.comm_id)
"""


def first_update(kernel: Kernel, request: str) -> dict[str, Any]:
    """The state of the first update that answers a message: what a page takes for all of it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            message = kernel.client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        data = message["content"].get("data", {})
        if message["parent_header"].get("msg_id") == request and data.get("method") == "update":
            state: dict[str, Any] = data["state"]
            return state
    raise AssertionError("no update")


def test_the_first_update_that_answers_a_page_has_the_whole_state(clean_kernel: Kernel) -> None:
    kernel = clean_kernel
    comm_id = kernel.run(MONITOR).text
    session = kernel.client.session
    for _ in range(10):
        content = {"comm_id": comm_id, "data": {"method": "request_state"}}
        message = session.msg("comm_msg", content)
        kernel.client.shell_channel.send(message)
        state = first_update(kernel, message["header"]["msg_id"])
        assert {"status", "view", "lines", "lost", "_esm"} <= set(state)
    kernel.run("is_over.set(); thread.join()")
