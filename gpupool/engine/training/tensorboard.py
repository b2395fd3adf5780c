"""TensorBoard's event files, at any URL, written by the first rank as events pass. Runs on engines.

Needs the package `tensorboard` (extra "tensorboard"), which is imported when it is used. A file on
a local disk grows; in a store, which can only replace files, it is replaced now and then.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.progress import progress
from gpupool.core.urls import without_passwords
from gpupool.core.wire.events import Event, StepEvent, ValidationEvent, WarningEvent
from gpupool.data.stores.writable import Target

FLUSH_EVERY_S = 15.0


class Board:
    """An event file below `url`. A thread writes it; `news` are warnings of what it could not.

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
        self._written, self._buffer = bytearray(), io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._flushed_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "gpupool-board")  # starts with the first part
        self.news: list[Event] = []
        self._step = 0
        self._write(file_version="brain.Event:2")

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, (StepEvent, ValidationEvent)):
                self._step = event.step
                self._scalars(event)
        if time.monotonic() - self._flushed_at > FLUSH_EVERY_S:
            self.flush()

    def go_on(self, step: int) -> None:
        """Training resumes after this step: what older files have of later ones is ignored."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def flush(self) -> None:
        self._flushed_at = time.monotonic()
        self._thread.submit(self._put, self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()

    def close(self) -> None:
        self.flush()
        with progress("writing the TensorBoard events"):
            self._thread.shutdown()
        self._thread = ThreadPoolExecutor(1, "gpupool-board")  # an error may come after the end

    def _scalars(self, event: StepEvent | ValidationEvent) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {"loss": event.loss}
        if event.accuracy is not None:
            numbers["accuracy"] = event.accuracy
        if isinstance(event, ValidationEvent):
            part, numbers = "validation", numbers | event.metrics
        else:
            part, numbers["lr"] = "train", event.lr
        values = [
            Summary.Value(tag=f"{part}/{name}", simple_value=numbers[name]) for name in numbers
        ]
        self._write(step=event.step, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._records.write(Record(wall_time=time.time(), **fields).SerializeToString())

    def _put(self, part: bytes) -> None:
        """In the thread."""
        try:
            if "://" in self._target.url:
                self._written += part
                self._target.put(self._name, self._written)
            else:
                with Path(self._target.url, self._name).open("ab") as file:
                    file.write(part)
        except (DataError, OSError) as error:  # training continues without it
            said = f"TensorBoard's file could not be written: {error}"
            self.news.append(WarningEvent("tensorboard", said, self._step))
