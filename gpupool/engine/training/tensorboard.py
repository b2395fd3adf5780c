"""TensorBoard's event files, at any URL, written by the first rank as events pass. Runs on engines.

Needs the package `tensorboard` (extra "tensorboard"), which is imported when it is used. A file on
a local disk grows; in a store, which can only replace files, it is replaced now and then.
"""

from __future__ import annotations

import io
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.progress import progress
from gpupool.core.urls import without_passwords
from gpupool.core.wire.events import Event, StepEvent, ValidationEvent, WarningEvent
from gpupool.data.stores.writable import Target

FLUSH_EVERY_S = 15.0


class Board:
    """An event file below `url`. A thread writes it; the caller reports its `failures`.

    Raises TrainingError if `tensorboard` is not installed, or nothing can be written there.
    """

    def __init__(self, url: str) -> None:
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise TrainingError(
                f"tensorboard={without_passwords(url)!r} needs the package tensorboard: "
                "pip install 'gpupool[tensorboard]', and restart the pool."
            ) from None
        self._target = Target(url)
        try:
            self._target.check()
        except DataError as error:
            raise TrainingError(f"tensorboard: {error}") from None
        self._name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._num_images, self._seconds = 0, 0.0
        self._flushed_at = time.monotonic()
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._write(file_version="brain.Event:2")

    def __call__(self, events: Sequence[Event]) -> None:
        """Write these events."""
        for event in events:
            match event:
                case StepEvent():
                    self._step(event)
                case ValidationEvent():
                    self._validation(event)
                case WarningEvent():
                    self._text(f"warning/{event.about}", event.message, event.step)
        if time.monotonic() - self._flushed_at > FLUSH_EVERY_S:
            self.flush()

    def go_on(self, step: int, elapsed_s: float) -> None:
        """Training resumes after this step, which came after so many seconds.

        TensorBoard then ignores what older files have of later steps.
        """
        self._seconds = elapsed_s
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def flush(self) -> None:
        """Have written what there is so far."""
        self._flushed_at = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpupool-board", daemon=True)
            self._thread.start()
        self._parts.put(self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()

    def close(self) -> None:
        """Write the rest, and wait for it."""
        self.flush()
        assert self._thread is not None  # it is there after a flush
        self._parts.put(None)
        with progress("writing the TensorBoard events"):
            self._thread.join()
        self._thread = None

    def failures(self) -> list[str]:
        """What could not be written since the last call, a sentence each."""
        found = []
        while not self._failures.empty():
            found.append(self._failures.get())
        return found

    def _step(self, event: StepEvent) -> None:
        numbers = {"train/loss": event.loss, "train/lr": event.lr}
        if event.accuracy is not None:
            numbers["train/accuracy"] = event.accuracy
        self._num_images += event.num_samples
        if event.elapsed_s - self._seconds > 1.0:
            numbers["train/samples_per_s"] = self._num_images / (event.elapsed_s - self._seconds)
            self._num_images, self._seconds = 0, event.elapsed_s
        self._scalars(numbers, event.step)

    def _validation(self, event: ValidationEvent) -> None:
        numbers = {"validation/loss": event.loss}
        if event.accuracy is not None:
            numbers["validation/accuracy"] = event.accuracy
        numbers |= {f"validation/{name}": value for name, value in event.metrics.items()}
        self._scalars(numbers, event.step)

    def _scalars(self, numbers: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self._write(step=step, summary=Summary(value=values))

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        metadata = create_summary_metadata(display_name=tag, description="")
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._write(step=step, summary=Summary(value=[value]))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._records.write(Record(wall_time=time.time(), **fields).SerializeToString())

    # ---- in the thread -------------------------------------------------------------------

    def _work(self) -> None:
        whole = bytearray()
        while (part := self._parts.get()) is not None:
            whole += part
            try:
                if "://" in self._target.url:
                    self._target.put(self._name, whole)
                else:
                    with Path(self._target.url, self._name).open("ab") as file:
                        file.write(part)
            except (DataError, OSError) as error:  # training continues without it
                self._failures.put(f"TensorBoard's file could not be written: {error}")
