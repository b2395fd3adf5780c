"""Whether this engine is busy, published only where somebody waits for it. Runs on engines.

ipykernel publishes "busy" before each call and "idle" after it, by which a client knows that it has
all output. Each costs every process on its way half a millisecond. The pool's own client needs no
"busy", and no "idle" after a call that has published nothing: the reply says so.
"""

from __future__ import annotations

from typing import Any


def install(kernel: Any) -> None:
    """Leave out what the client does not need that is calling now; others hear what they did."""
    owner = kernel.get_parent("shell")["header"]["session"]
    publish, apply, channel = (
        kernel._publish_status,
        kernel.do_apply,
        kernel.iopub_socket.gpupool_channel,
    )
    began, is_silent = channel.num_published, False

    def do_apply(*args: Any) -> Any:
        nonlocal is_silent
        reply, buffers = apply(*args)
        is_silent = channel.is_silent_since(began) and _is_of(owner, kernel)
        return {**reply, "silent": is_silent}, buffers

    def publish_status(status: str, channel_name: str, parent: Any = None) -> None:
        nonlocal began, is_silent
        if channel_name != "shell" or not _is_of(owner, kernel):
            publish(status, channel_name, parent)
        elif status == "busy":
            began, is_silent = channel.num_published, False
        elif not is_silent:
            publish(status, channel_name, parent)

    kernel.do_apply, kernel._publish_status = do_apply, publish_status


def _is_of(owner: str, kernel: Any) -> bool:
    return bool(kernel.get_parent("shell")["header"]["session"] == owner)
