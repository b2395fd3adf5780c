"""The process that has a pool: `python -m tests.security.victim`, as one of two users."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq

import gpupool
from gpupool.pool import session
from tests.security.lines import serve
from tests.support.processes import until

NUM_SAMPLES = 32


def start() -> None:
    """Start a pool."""
    session.start(n=2, device="cpu")


def run(source: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Run a cell; "values" and "texts" by rank."""
    result = session.current_pool().run(source, timeout_s=timeout_s)
    texts = {rank: result.text(rank) for rank in result}
    return {"values": {rank: result[rank] for rank in result}, "texts": texts}


def train() -> dict[str, Any]:
    """Train a tiny network for three epochs; the losses."""
    inputs = torch.linspace(-1, 1, NUM_SAMPLES)[:, None]
    samples = torch.utils.data.TensorDataset(inputs, 2 * inputs)
    options = gpupool.TrainingOptions(epochs=3, batch_size=8, lr=0.1)
    loss = torch.nn.functional.mse_loss
    run = gpupool.train(torch.nn.Linear(1, 1), samples, loss, options, wait=False)
    run.result()
    return {"losses": [float(point.loss) for point in run.history.steps]}


def kill(rank: int) -> None:
    """Kill a rank, and wait until it is replaced."""
    pool = session.current_pool()
    pid = pool.status().pids[rank]
    os.kill(pid, signal.SIGKILL)
    until(lambda: pool.status().pids.get(rank) != pid, 60.0, "its being replaced")
    pool.wait_until_usable()


def listeners() -> list[int]:
    """The ports that this process and those below listen at."""
    me = psutil.Process()
    found = [one for p in (me, *me.children(recursive=True)) for one in p.net_connections("inet")]
    return sorted({one.laddr.port for one in found if one.status == psutil.CONN_LISTEN})


def publish() -> int:
    """Publish for ever, to everybody; the port. Not the pool's: what can be heard, is."""
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def speak() -> None:
        while True:
            socket.send(b"heard by everybody")
            time.sleep(0.02)

    threading.Thread(target=speak, daemon=True).start()
    return port


def stop() -> None:
    """Stop the pool, if there is one."""
    session.stop()


if __name__ == "__main__":
    Path.cwd()  # a user without a folder has no pool
    commands = (start, run, train, kill, listeners, publish, stop)
    serve({command.__name__: command for command in commands})
    stop()
    os._exit(0)  # the thread that publishes does not end
