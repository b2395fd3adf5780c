"""What a pool asks of its engines, wherever they run. Runs on the client.

`engines.Engines` are processes; `inline.InlineEngines` is this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from gpupool.core.machine.topology import Rank
from gpupool.core.wire.requests import ControlRequest
from gpupool.pool.notices import Progress
from gpupool.pool.processes.iopub import OnMessage


class RankEngines(Protocol):
    """One engine per rank. Their methods are described at `Engines`."""

    last_used: float

    def lock_gpus(self, uuids: Sequence[str], number: int, force: bool = False) -> list[str]: ...
    def start(self, ranks: Sequence[Rank], timeout_s: float, progress: Progress) -> None: ...
    def restart(self, ranks: Sequence[int], timeout_s: float, progress: Progress) -> None: ...
    @property
    def pids(self) -> Mapping[int, int]: ...
    @property
    def client_file(self) -> Path: ...
    def of_others(self, ranks: Iterable[int]) -> list[int]: ...
    def alive_ranks(self) -> list[int]: ...
    def busy_ranks(self) -> list[int]: ...
    def running(self) -> list[tuple[int, int | None]]: ...
    def call(
        self,
        rank: int,
        name: str,
        payload: dict[str, Any],
        on_message: OnMessage | None = None,
        number: int | None = None,
    ) -> Future[Any]: ...
    def call_all(
        self,
        name: str,
        payload: dict[str, Any],
        ranks: Iterable[int] | None = None,
        timeout_s: float = 60.0,
    ) -> dict[int, Any]: ...
    def interrupt(self, numbers: Mapping[int, int | None]) -> None: ...
    def kill(self, rank: int, reason: str) -> None: ...
    def control(
        self, request: ControlRequest, ranks: Iterable[int] | None = None
    ) -> dict[int, Future[dict[str, Any]]]: ...
    def new_file(self, name: str) -> Path: ...
    def log(self, rank: int) -> str: ...
    def stop(self) -> None: ...
