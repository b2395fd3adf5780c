"""The ranks of a pool, with all that a call on them needs. Runs on the client.

Calls, variables and the pool itself are built on it. It knows none of them: what they do about a
loss or a new rank, they say by hooks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakValueDictionary

from gpupool.core.errors import (
    EngineDiedError,
    GroupError,
    PoolError,
    PoolStartError,
    SpmdError,
    UnansweredError,
)
from gpupool.core.options.pool_options import PoolOptions, parse_ranks
from gpupool.core.wire.calls import Call, Prepare, WarmUp
from gpupool.core.wire.events import from_dict
from gpupool.core.wire.masking import redact, redact_all
from gpupool.core.wire.output import OnOutput, OutputKind
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found
from gpupool.pool.engines.engines import Engines
from gpupool.pool.environment.environment import Environment, notebook_place
from gpupool.pool.launchers.placement import Placement, place_ranks
from gpupool.pool.notices import NoticeLines, Progress, with_bar
from gpupool.pool.upkeep.forming import Forming
from gpupool.pool.upkeep.health import Health
from gpupool.pool.upkeep.turns import Turn, Turns

_log = logging.getLogger("gpupool")
_NUM_REPLACEMENTS = 3  # of a rank that does not come up


class Supervised(Protocol):
    """A call that a thread supervises: `calls/execution.py`.

    `ends_well` asks a training to stop and to keep its network; it is taken by who calls it.
    """

    ends_well: Callable[[], None] | None

    def interrupt(self) -> None:
        """Interrupt the ranks that still run, and free them from collectives."""


class Ranks:
    """One engine per rank, their turns, process group, environment and health.

    Any thread may call it. Its hooks:
        on_lost(rank, numbers): the rank does not have these parcels, though they were on their way.
        on_replaced(rank, how): the rank is new; `how` the one before it ended ("was restarted").
        hint(rank, evalue): what to add to the error of a rank that lacks a name, and the name.
    """

    placement: Placement

    def __init__(
        self,
        options: PoolOptions,
        on_change: Callable[[], None],
    ) -> None:
        """Nothing is started yet; `on_change` is called when the pool breaks or is mended."""
        self.options = options
        self.last_error: SpmdError | None = None  # of a cell or function, for the debugger
        self.turns = Turns(self.reform_group)
        self.engines = Engines(self._on_loss)
        self.group = Forming(self.engines)
        self.environment = Environment(self.engines)
        self.secrets = self.environment.secrets  # values of now, and those that are sent later
        self.health = Health(self.secrets, on_change)
        self.on_lost: Callable[[int, Iterable[int]], None] = lambda rank, numbers: None
        self.on_replaced: Callable[[int, str], None] = lambda rank, how: None
        self.hint: Callable[[int, str], tuple[str, str]] = lambda rank, evalue: ("", "")
        # number -> the call on several ranks that is supervised, and can be ended as a whole
        self.supervised: WeakValueDictionary[int, Supervised] = WeakValueDictionary()
        self.ladder_scale = 1.0  # of the times of `calls/freeing.py`; tests wait for less
        self._on_change = on_change
        self._changing = threading.RLock()  # one at a time changes engines or their group
        self._is_up = False
        self._losing = threading.Lock()
        self._recovery: Turn | None = None  # in which lost ranks are replaced, unasked
        self._unreported: dict[int, str] = {}  # of ranks whose end no cell has reported

    def start(self, variables: Mapping[str, str], progress: Progress) -> None:
        """Place the ranks, start their engines, send `variables` and form the group.

        Raises:
            OptionsError, PlacementError, PoolError: something may run then, until `stop`.
        """
        self.placement = place_ranks(self.options, self._lock_gpus)
        for note in self.placement.notes:
            NoticeLines()(note)
        self.engines.start(self.placement.ranks, self.options.timeout_s, progress)
        self._prepare()
        self.environment.start(variables)
        self._form_group()
        self._is_up = True

    def stop(self) -> None:
        """End every process."""
        self.environment.close()
        self.engines.stop()

    # ---- what a call asks of them --------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.placement.ranks)

    @property
    def state(self) -> str:
        """What `PoolStatus.state` says."""
        state = self.health.state
        if state == "well":
            # what has no number is the pool's own, the forming of its group say
            has_calls = any(number is not None for _, number in self.engines.running())
            return "busy" if has_calls else "idle"
        return state

    def select(self, ranks: str | int | Iterable[int] | None) -> tuple[int, ...]:
        """The ranks meant by "all", "0:4", 3, [0, 2] or None (all), in ascending order."""
        if ranks is None:
            return tuple(r.rank for r in self.placement.ranks)
        text = ranks if isinstance(ranks, (str, int)) else ",".join(map(str, ranks))
        return parse_ranks(str(text), self.world_size)

    def call(
        self, rank: int, call: Call[Value], on_output: OnOutput | None = None
    ) -> Future[Reply[Value]]:
        """Make a call on one rank. Fails at once should the engine die meanwhile."""

        def on_message(kind: OutputKind, content: Any) -> None:
            if on_output is not None:
                if kind is OutputKind.EVENTS:  # the recorder masks all else, chunk by chunk
                    content = [from_dict(plain) for plain in redact_all(content, self.secrets)]
                on_output(rank, kind, content)

        return self.engines.call(rank, call, on_message)

    def ask(
        self, request: ControlRequest[Found], ranks: Iterable[int]
    ) -> dict[int, Future[Answer[Found]]]:
        """Send a control request to some ranks: rank -> its answer, without those that are gone.

        The status of one that dies meanwhile is "died"; one that does not react never answers.
        """
        return self.engines.control(request, ranks)

    def wait_until_usable(self) -> None:
        """Wait for ranks that are just being replaced, then raise the PoolError that says why
        nothing can run, if so.

        Not for a thread that such a replacement may have to wait for.
        """
        self.turns.wait_until_mended()
        if self.health.lacks_group:  # another user has disturbed, say, and may have ended
            self.reform_group()
        self.health.require_usable()
        unreported, self._unreported = self._unreported, {}
        for text in unreported.values():
            NoticeLines()(text)

    def wait_for_restart(self) -> None:
        """Wait until no rank is being replaced, nor the group formed."""
        with self._changing:
            pass

    # ---- the group, and new engines ------------------------------------------------------

    def reform_group(self) -> None:
        """Form the group again, one generation higher, if every rank is there to join."""
        with self._changing:
            lacks_group, num_losses = self.health.lacks_group, self.health.num_losses
            if self.health.state != "well" and not lacks_group:
                return
            try:
                self._form_group()
            except EngineDiedError:
                pass  # it is being replaced, and the group formed then
            except PoolError as error:
                self.health.give_up(str(error), ())
            else:
                if lacks_group:
                    self.health.mark_mended((), num_losses)

    def restart(self, ranks: Sequence[int], progress: Progress) -> None:
        """Start new engines in the place of those of some ranks: see `Pool.restart`."""
        with self._changing:
            self.health.require_restartable()
            for rank in ranks:  # what it had is given up on purpose
                self._unreported.pop(rank, None)
            try:
                self._mend(ranks, progress)
            except KeyboardInterrupt:  # it came at any point, and cannot mean half of a pool
                for rank in ranks:
                    self._lose(f"rank {rank} was restarted.", "", rank)
                raise
            if self.health.state != "replacing":  # one that has died since is replaced unasked
                self.health.require_usable()

    @property
    def replaced_after(self) -> tuple[str, ...]:
        """What runs on the other ranks and ends before a replacement begins."""
        return self.turns.mending_waits_for

    # ---- inside --------------------------------------------------------------------------

    def _on_loss(self, sentence: str, log_tail: str, rank: int | None, is_heard: bool) -> None:
        """Hear of the end of a process: see `Engines`."""
        if rank is not None and not is_heard:
            lost = "It has been replaced; its variables are lost, the other ranks have theirs."
            self._unreported[rank] = redact(f"{sentence} {lost}", self.secrets)
        self._lose(sentence, log_tail, rank)

    def _lock_gpus(self, uuids: Sequence[str], number: int) -> list[str]:
        return self.engines.lock_gpus(uuids, number, self.options.force)

    def _prepare(self, ranks: Sequence[int] | None = None) -> None:
        self.engines.call_all(Prepare(notebook_place()), ranks)
        on_gpu = [one.rank for one in self.placement.ranks if one.gpu]
        chosen = [rank for rank in on_gpu if ranks is None or rank in ranks]
        try:  # now: the forming of the group is too short for a driver that is just waking up
            self.engines.call_all(WarmUp(), chosen, self.options.timeout_s)
        except UnansweredError as error:
            listed = ", ".join(map(str, error.ranks))
            raise PoolStartError(
                f"the GPU of rank {listed} did not begin to work within {self.options.timeout_s:g} "
                "s. A larger timeout_s (--timeout) gives a slow machine more time.",
                ranks=error.ranks,
            ) from None

    def _form_group(self) -> None:
        placed = self.placement
        self.group.form(placed.backend, placed.training_ranks, placed.training_backend)

    def _replace(self, ranks: Sequence[int], progress: Progress) -> str:
        """Start new engines for these ranks; why they then have no process group, or ""."""
        others = [rank for rank in self.engines.alive_ranks() if rank not in ranks]
        for rank in ranks:
            self.on_replaced(rank, self.health.lost.get(rank, "was restarted"))
        self.engines.restart(ranks, self.options.timeout_s, progress)
        self._prepare(ranks)
        self.environment.bring(ranks)
        # The others may compute, or wait in the old group for a rank that is gone.
        busy = [rank for rank in self.engines.busy_ranks() if rank in others]
        self.engines.interrupt(dict.fromkeys(busy))
        self.group.abort(dict.fromkeys(others))
        try:
            self._form_group()
        except GroupError as error:
            return str(error)
        return ""

    def _mend(self, ranks: Iterable[int], progress: Progress) -> None:
        """Replace these ranks, and those that are lost or go meanwhile, while nothing else changes
        them. `health` says what could not be mended."""
        wanted, late = set(ranks), time.monotonic() + self.options.timeout_s
        for attempt in range(1, _NUM_REPLACEMENTS + 1):
            num_losses = self.health.num_losses  # before `lost` is asked for
            wanted.update(self.health.lost)
            chosen = tuple(sorted(wanted))
            listed = ", ".join(map(str, chosen))
            try:
                with with_bar(progress, f"Starting rank {listed} again") as stage:
                    ungrouped = self._replace(chosen, stage)
            except Exception as error:  # of one that has died meanwhile, say
                is_late = time.monotonic() > late or self.health.stopped
                if is_late or attempt == _NUM_REPLACEMENTS:
                    reason = f"rank {listed} could not be started again: {error}"
                    self.health.give_up(reason, chosen)
                    return
            else:
                self.health.mark_mended(chosen, num_losses)
                if ungrouped:
                    self.health.give_up(ungrouped, ())
                if self.health.state != "replacing":
                    return
                wanted.clear()

    def _lose(self, sentence: str, log_tail: str, rank: int | None) -> None:
        """Note that a process is gone, and have its rank replaced."""
        with self._losing:
            self.health.lose(sentence, log_tail, rank)
            replaces = rank is not None and self._is_up and self.health.state == "replacing"
            if replaces and self._recovery is None:  # else the thread looks again before it ends
                name = f"the replacement of rank {rank}"
                self._recovery = self.turns.ask(range(self.world_size), name, first=True)
                work = threading.Thread(target=self._recover, args=[self._recovery], daemon=True)
                work.name = "gpupool-recovery"
                work.start()
        self._on_change()

    def _recover(self, turn: Turn) -> None:
        """Replace lost ranks as long as there are any. It has its turn like a cell, before all that
        wait: what runs on the other ranks ends first, and nothing begins until the group is whole.
        """
        try:
            self.turns.begin(turn, timeout_s=None)
            while not self._is_recovered():
                with self._changing:
                    if self.health.state == "replacing":  # and not mended by a restart
                        self._mend((), _log.debug)
        except Exception:  # whoever waits would wait for ever
            _log.exception("lost ranks were not replaced")
            with self._losing:
                self._recovery = None
        finally:
            self.turns.end(turn)

    def _is_recovered(self) -> bool:
        with self._losing:
            if self.health.state != "replacing":
                self._recovery = None
            return self._recovery is None
