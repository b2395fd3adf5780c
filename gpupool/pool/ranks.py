"""The ranks of a pool, with all that a call on them needs. Runs on the client.

Calls, variables and the pool itself are built on it. It knows none of them: what they do about a
loss or a new rank, they say by hooks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from gpupool.core.errors import PoolError, SpmdError, UnansweredError
from gpupool.core.options.pool_options import PoolOptions, parse_ranks
from gpupool.core.wire.calls import Prepare, WarmUp
from gpupool.core.wire.masking import redact
from gpupool.pool.engines.carry import Carrier
from gpupool.pool.engines.engines import NEW_POOL, Engines, Loss, with_log
from gpupool.pool.environment.environment import Environment, notebook_place
from gpupool.pool.launchers.placement import Placement
from gpupool.pool.notices import NoticeLines, Progress, unheard, with_bar
from gpupool.pool.upkeep.forming import Forming
from gpupool.pool.upkeep.turns import Turn, Turns

_ASK_AGAIN_S = 1.0
_NUM_ATTEMPTS = 4  # to mend the pool: another user may disturb, whom new listeners shut out


class Trouble(NamedTuple):
    """Why a pool cannot be used: its `kind` is that of the error; all is well without.

    It is "stopped" (`reason`: why, if that is to be said), "lost" (a process that all ranks need),
    "replacing" (lost ranks), "given up" (ranks that are not replaced unasked) or "no group" (which
    could not be formed, and all ranks are there).
    """

    kind: str = ""
    reason: str = ""
    log_tail: str = ""


class Ranks:
    """One engine per rank, their turns, process group and environment: what a pool builds on.

    Any thread may call it.

    One thread replaces lost ranks, in a turn of theirs, and forms the group again, in a turn of all
    ranks. These come before those that wait: what runs there ends first, and nothing begins until
    all is well, but for tasks, which need no group.

    Its hooks:
        on_lost(rank, numbers): the rank does not have these parcels, though they were on their way.
        on_replaced(rank, how): the rank is new; `how` the one before it ended ("was restarted").
        hint(rank, evalue): what to add to the error of a rank that lacks a name, and the name.
    """

    placement: Placement

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self.last_error: SpmdError | None = None  # of a cell or function, for the debugger
        self.engines = Engines(options.timeout_s, self._on_loss)
        self.secrets = self.engines.secrets  # values of now, and those that are sent later
        self.turns = Turns(self.engines.changed)
        self.group = Forming(self.engines)
        self.environment = Environment(self.engines)
        self.carrier = Carrier(self.engines)
        self.on_lost: Callable[[int, Iterable[int]], None] = lambda rank, numbers: None
        self.on_replaced: Callable[[int, str], None] = lambda rank, how: None
        self.hint: Callable[[int, str], str] = lambda rank, evalue: ""
        self.supervised: WeakValueDictionary[int, Any] = WeakValueDictionary()  # Executions
        # These are changed with `engines.changed` held.
        self._is_up = False
        self._mends = False  # a thread replaces ranks and forms the group, or is about to
        self._wants_group = False  # it was left, or has failed
        self._given_up = ""  # why lost ranks are not replaced unasked, or there is no group
        self._why_stopped = ""
        self._unreported: dict[int, Loss] = {}  # of which no cell has heard

    def _start(self, variables: Mapping[str, str], progress: Progress) -> None:
        """Place the ranks, start their engines, send `variables` and form the group.

        Raises:
            OptionsError, PlacementError, PoolError: something may run then, until `stop`.
        """
        engines = self.engines
        self.placement = engines.place(self.options, progress)
        for note in self.placement.notes:
            NoticeLines()(note)
        engines.start(self.placement.ranks, progress)
        self._prepare(range(self.world_size))
        self.environment.start(variables)
        self._is_up = True  # one that is lost from now on is replaced
        self.reform_group()
        self.wait_until_mended()
        self.require_usable()

    # ---- what is asked of them -----------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.placement.ranks)

    @property
    def training_ranks(self) -> tuple[int, ...]:
        """The ranks that train, and that tasks run on: those with a GPU, or all."""
        return self.placement.training_ranks

    def select(self, ranks: str | int | Iterable[int] | None) -> tuple[int, ...]:
        """The ranks meant by "all", "0:4", 3, [0, 2] or None (all), in ascending order."""
        if ranks is None:
            return tuple(r.rank for r in self.placement.ranks)
        text = ranks if isinstance(ranks, (str, int)) else ",".join(map(str, ranks))
        return parse_ranks(str(text), self.world_size)

    @property
    def generation(self) -> int:
        """The number of the process group: one higher each time it is formed."""
        self.wait_until_mended()
        return self.group.generation

    @property
    def trouble(self) -> Trouble:
        """The first thing that has gone wrong."""
        engines = self.engines
        losses = [engines.broken] if engines.broken else list(engines.losses.values())
        if engines.stopped:
            return Trouble("stopped", self._why_stopped)
        if self._given_up and not engines.broken:
            return Trouble("given up" if losses else "no group", self._given_up)
        if losses:
            kind = "lost" if engines.broken else "replacing"
            return Trouble(kind, losses[0].sentence, losses[0].log_tail)
        return Trouble()

    @property
    def state(self) -> str:
        """What `PoolStatus.state` says."""
        if kind := self.trouble.kind:
            return kind if kind in ("stopped", "replacing") else "broken"
        # what has no number is the pool's own, the forming of its group say
        return "busy" if any(number for _, number in self.engines.running()) else "idle"

    def require_usable(self) -> None:
        """Raise the PoolError that says why nothing can run, if so."""
        kind, reason, log_tail = self.trouble
        lost = sorted(self.engines.losses)
        listed = ",".join(map(str, lost))
        way_on = {
            "stopped": "`%gpupool start` (gpupool.start()) makes a new one.",
            "lost": NEW_POOL,
            "given up": f"`%gpupool restart {listed}` replaces it; the other ranks keep theirs.",
            "no group": "The ranks keep their variables, and the next run tries again.",
            "replacing": f"Rank {listed} is being replaced: run it again in a moment.",
        }
        if kind == "stopped":
            reason = "this pool was stopped."
        if kind:
            raise PoolError(with_log(f"{reason} {way_on[kind]}", log_tail), ranks=lost)

    def wait_until_mended(self, timeout_s: float | None = None) -> None:
        """Wait until no rank is being replaced, nor the group formed.

        Not for a thread that this may have to wait for.
        """
        engines, turns = self.engines, self.turns

        def is_over() -> bool:  # or is the turn of cells on other ranks, and no rank is missing
            return not (self._mends and (engines.losses or not turns.mending_waits_for))

        with engines.changed:
            engines.changed.wait_for(is_over, timeout_s)

    def wait_until_usable(self) -> None:
        """`wait_until_mended`, with another try if there is no group, then `require_usable`."""
        self.wait_until_mended()
        if self.trouble.kind == "no group":  # another user has disturbed, say, and may have ended
            self.reform_group()
            self.wait_until_mended()
        self.require_usable()
        unreported, self._unreported = self._unreported, {}
        for loss in unreported.values():
            NoticeLines()(
                f"{loss.sentence} It has been replaced; its variables are lost, the other ranks "
                "have theirs."
            )

    # ---- the group, and new engines ------------------------------------------------------

    def reform_group(self) -> None:
        """Have the group formed again, one generation higher, before anything else begins."""
        with self.engines.changed:
            self._wants_group = True
            self._begin_to_mend()

    def restart(
        self, ranks: str | int | Iterable[int] | None = None, *, progress: Progress = unheard
    ) -> None:
        """End the engines of some ranks, or of all, and start new ones in their place.

        A new engine has the rank, device and environment of the old one; its variables are lost,
        those of the other ranks stay. What runs on them is interrupted. The group is formed again
        when what runs on the others has ended. A rank that has died is replaced without
        being asked. A restart that is interrupted continues in the background.

        Raises:
            PoolError: the pool was stopped or has lost its controller, or a new engine did not come
                up.
        """
        chosen = self.select(ranks)
        if self.trouble.kind in ("stopped", "lost"):
            self.require_usable()
        self.engines.launch.require_folder()
        what = f"starting rank {', '.join(map(str, chosen))} again"
        with with_bar(progress, what.capitalize()) as stage:
            stage(what)
            with self.engines.changed:
                self.engines.lose(chosen, "was restarted")
                self._given_up = ""
                self._begin_to_mend()
                for rank in chosen:
                    self._unreported.pop(rank, None)  # what it had is given up on purpose
                    self.engines.kill(rank, "was restarted")
            self.wait_until_mended()
        if self.trouble.kind != "replacing":  # one that has died since is replaced unasked
            self.require_usable()

    def give_up(self, reason: str, ranks: Iterable[int] = ()) -> None:
        """From now on every run is refused with this reason, until these ranks are restarted.

        Without ranks it is the process group that is missing: the next run forms it first.
        """
        with self.engines.changed:
            self._given_up = redact(reason, self.secrets)
            self.engines.lose(ranks, "could not be used any more")

    # ---- inside --------------------------------------------------------------------------

    def _prepare(self, ranks: Sequence[int]) -> None:
        # The controller knows ranks that have just come up by their hearts, and what it has no
        # connection for yet is lost: they are asked again.
        late = time.monotonic() + self.options.timeout_s
        while True:
            try:
                self.engines.call_all(Prepare(notebook_place()), ranks, timeout_s=_ASK_AGAIN_S)
                break
            except UnansweredError as error:
                if time.monotonic() > late:
                    raise self.engines.too_late(f"rank {error.ranks[0]}") from None
        on_gpu = [rank for rank in ranks if self.placement.ranks[rank].gpu]
        try:  # now: the forming of the group is too short for a driver that is just waking up
            self.engines.call_all(WarmUp(), on_gpu, self.options.timeout_s)
        except UnansweredError as error:
            raise self.engines.too_late(f"the GPU of rank {error.ranks[0]}") from None

    def _on_loss(self, rank: int, loss: Loss) -> None:
        if not loss.is_heard:
            self._unreported[rank] = loss
        if self._is_up and self.trouble.kind != "given up":
            self._begin_to_mend()

    def _begin_to_mend(self) -> None:
        """Have a thread mend what is to be mended, if none does; with `engines.changed` held."""
        if self.trouble.kind == "no group":  # it is tried again
            self._given_up = ""
        if not self._mends:
            self._mends = True
            everyone = range(self.world_size)
            turn = self.turns.ask(everyone, "the forming of the process group", "forms")
            threading.Thread(
                target=self._mend, args=[turn], name="gpupool-mending", daemon=True
            ).start()

    def _mend(self, turn: Turn) -> None:
        """Replace what is lost and form the group, until all is well or is given up."""
        late, errors = time.monotonic() + self.options.timeout_s, list[Exception]()
        replaced = set[int]()
        while self._has_to_mend(turn):
            lost = self.engines.losses
            try:
                if lost:
                    self._replace(lost, turn)
                    replaced |= lost.keys()
                elif not turn.began:  # a rank may be lost meanwhile
                    self.turns.begin(turn, timeout_s=None)
                    late = time.monotonic() + self.options.timeout_s
                else:
                    if replaced:  # the others may wait in the old group
                        others = {*self.engines.alive_ranks()} - replaced
                        busy = {rank for rank, _ in self.engines.running()} & others
                        self.engines.interrupt(dict.fromkeys(busy))
                        self.group.abort(dict.fromkeys(others))
                        replaced.clear()
                    self.group.form(self.placement)
                    self._wants_group = False
                    errors.clear()
            except Exception as error:  # of one that has died meanwhile, say
                errors.append(error)
                if len(errors) == _NUM_ATTEMPTS or time.monotonic() > late:
                    # The first one says why; later ones may only hear that somebody does not come.
                    why = next(str(one) for one in errors if type(one) is type(error))
                    if lost := self.engines.losses:
                        listed = ", ".join(map(str, sorted(lost)))
                        why = f"rank {listed} could not be started again: {why}"
                    self.give_up(why, lost)

    def _has_to_mend(self, turn: Turn) -> bool:
        """Whether there is something to mend; if not, the turn is over."""
        with self.engines.changed:
            kind = self.trouble.kind
            self._mends = kind == "replacing" or (not kind and self._wants_group)
            if not self._mends:
                self.turns.end(turn)
            return self._mends

    def _replace(self, lost: Mapping[int, Loss], forming: Turn) -> None:
        turn = forming
        if not forming.began:
            turn = self.turns.ask(lost, "the replacement of a rank", "replaces")
        try:
            if turn is not forming:
                self.turns.begin(turn, timeout_s=None)
            for rank, loss in lost.items():
                self.on_replaced(rank, loss.how)
            self.engines.restart(sorted(lost))
            self._prepare(sorted(lost))
            self.environment.bring(lost)
            with self.engines.changed:
                self._wants_group = True
                self.engines.note_replaced(lost)
        finally:
            if turn is not forming:
                self.turns.end(turn)
