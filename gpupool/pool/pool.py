"""The pool: all engines of this notebook, from start to stop. Runs on the client."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from gpupool.core.errors import EngineDiedError, GroupError, PoolError, PoolStartError, SpmdError
from gpupool.core.masking import Secrets, redact, redact_all
from gpupool.core.options import PoolOptions, parse_ranks
from gpupool.core.processes import lack_of_processes
from gpupool.pool import idle, presses, stages
from gpupool.pool.client import plain_client
from gpupool.pool.composite import Composite
from gpupool.pool.engines import Engines
from gpupool.pool.environment import Environment, notebook_place, variables_at_start
from gpupool.pool.execution import Execution, OnNotice, OnOutput, unnoticed
from gpupool.pool.forming import Forming
from gpupool.pool.health import Health
from gpupool.pool.notices import NoticeLines
from gpupool.pool.placement import place_ranks
from gpupool.pool.protocol import RankEngines
from gpupool.pool.recovery import Recovery
from gpupool.pool.result import OutputRecorder, SpmdResult
from gpupool.pool.stages import Progress, unheard
from gpupool.pool.status import PoolStatus
from gpupool.pool.sync import sync_state
from gpupool.pool.turns import Turns
from gpupool.pool.variables import Variables

_NUM_REPLACEMENTS = 3  # of a rank that does not come up


class Pool:
    """One engine per rank, alive until stopped. Made by `gpupool.start`; a context manager."""

    def __init__(self, options: PoolOptions, progress: Progress = unheard) -> None:
        self.options = options
        self.last_error: SpmdError | None = None  # of a cell or function, for the debugger
        self.turns = Turns(self.reform_group)
        self._forming = threading.RLock()  # one at a time changes engines or their group
        # how what runs can be asked to end well
        self._stops: weakref.WeakKeyDictionary[Execution, Callable[[], None]] = (
            weakref.WeakKeyDictionary()
        )
        self._recovery = Recovery(self.turns, self._replace_lost)
        self._is_up = False
        self._untold: dict[int, str] = {}  # of ranks whose end no cell has told
        self._listeners: list[Callable[[PoolStatus], None]] = []
        variables = variables_at_start(options.env)
        self._at_exit: Callable[[], None] = lambda: None
        self._client: Any = None  # that of the user
        self._engines: RankEngines = self._make_engines()
        self.group = Forming(self._engines)
        self.environment = Environment(self._engines)
        self._health = Health(self.environment.secrets, self.tell_listeners)
        self.variables = Variables(self)
        try:
            placement = place_ranks(options, self._lock_gpus)
            self.ranks = placement.ranks
            self.training_ranks = placement.training_ranks
            self.backend = placement.backend
            self.training_backend = placement.training_backend
            self.why_cpu = placement.why_cpu
            self._engines.start(self.ranks, options.timeout_s, progress)
            self._engines.call_all("prepare", notebook_place())
            self.environment.start(variables)
            self._form_group()
        except PoolStartError:
            self.stop()
            raise
        except PoolError as error:
            # of a rank that has died: how, and not what would become of it in a pool that is up
            reason = self._health.told or redact(str(error), self.hidden_values())
            if why := lack_of_processes(reason):
                reason += f" ({why})"
            self.stop()
            message = f"the pool did not come up; nothing was left running. {reason}"
            raise PoolStartError(message) from None
        except BaseException:
            self.stop()
            raise
        self._is_up = True
        self._at_exit = _stop_at_exit(self)
        if options.idle_timeout_s is not None:
            idle.watch(self)

    # ---- what a user asks for ------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def generation(self) -> int:
        """The number of the process group: one higher each time it is formed."""
        return self.group.generation

    def run(
        self,
        source_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: str | int | Iterable[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> SpmdResult:
        """Run code on every rank: a piece of source as a cell, or a function called with `args`.

        Returns:
            One value per rank: the last expression's, or what the function returned.

        Raises:
            SpmdError: one or more ranks raised, were interrupted, or took longer than `timeout_s`.
        """
        __tracebackhide__ = True  # IPython and pytest leave such frames out
        chosen = self.select_ranks(ranks)
        recorder = OutputRecorder(chosen, self.hidden_values())
        execution = self.begin(
            source_or_function,
            *args,
            ranks=chosen,
            on_output=recorder,
            timeout_s=timeout_s,
            on_notice=NoticeLines(),
            **kwargs,
        )
        try:
            replies = execution.result()
        finally:
            recorder.finish()
        return SpmdResult(replies, recorder.outputs, execution.elapsed_s)

    def begin(
        self,
        source_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: Sequence[int],
        on_output: OnOutput,
        timeout_s: float | None = None,
        cell_number: int | None = None,
        shipments: Mapping[int, dict[str, Any]] | None = None,
        on_notice: OnNotice = unnoticed,
        **kwargs: Any,
    ) -> Execution:
        """Start what `run` does and return at once.

        Args:
            shipments: of a cell, rank -> the variables it uses: see `variables.Variables`.
            on_notice: hears what the user should know while it runs.
        """
        if not isinstance(source_or_function, str):
            call = (source_or_function, args, kwargs)
            return self.variables.begin_call(call, ranks, on_output, timeout_s, on_notice)
        cell = {"source": source_or_function, "cell_number": cell_number}
        shipments = {} if shipments is None else shipments
        payloads = {rank: {**cell, "shipment": shipments.get(rank)} for rank in ranks}
        return self.execute("run_source", payloads, on_output, timeout_s, on_notice=on_notice)

    def propagate_env(
        self, *names_or_globs: str, aws: bool = False, unset: bool = False
    ) -> dict[str, str]:
        """Copy environment variables of the notebook to every rank, present and future.

        The names are remembered: a pool that this notebook starts later gets them too.

        Args:
            names_or_globs: such as "HF_TOKEN" or "AWS_*".
            aws: also send what the notebook's own AWS credential chain finds (profile, SSO, role),
                and again before it expires, for as long as the pool lives.
            unset: remove the variables from the ranks instead.

        Returns:
            Name -> fingerprint of the value; values are never shown.
        """
        self.wait_until_usable()
        if unset:
            return dict.fromkeys(self.environment.unset(names_or_globs), "")
        return self.environment.propagate(names_or_globs, aws)

    def __getitem__(self, name: str) -> Composite:
        return self.variables.get(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.variables.set(name, value)

    def put(self, value: object) -> Any:
        """Bring a big value to every rank, once: `data = pool.put(data)`.

        In a cell the name then means the value itself. The ranks of a host share its memory, until
        one of them writes to it.

        Returns:
            A `Constant`; the ranks let the value go with it.

        Raises:
            TransferError: it cannot be sent.
        """
        return self.variables.put(value)

    @property
    def connection_file(self) -> str:
        """The file with which an `ipyparallel.Client` connects, in any process of the same user."""
        self.wait_until_usable()
        return str(self._engines.client_file)

    @property
    def client(self) -> Any:
        """An `ipyparallel.Client` of this pool: for views, `%px`, `load_balanced_view().map`.

        Engine ids are ranks. It is made when it is first asked for, and closed with the pool.
        """
        connection_file = self.connection_file
        if self._client is None:
            self._client = plain_client(Path(connection_file))
        return self._client

    def interrupt(self, calls: Collection[int] | None = None) -> bool:
        """Raise KeyboardInterrupt in what runs on the ranks.

        A training is asked to stop and to keep its network the first time.

        Args:
            calls: only those of these numbers, as `status` told them, without any those that have
                none: what has begun since then is left alone.

        Returns:
            Whether any of it still ran.
        """
        running = self._engines.running()
        if calls is not None:
            running = [(rank, n) for rank, n in running if (n in calls if calls else n is None)]
        numbers = {number for _, number in running}
        asked = [one for one in list(self._stops) if one.number in numbers and not one.done()]
        for execution in asked:
            self._stops.pop(execution)()
        stopping = {execution.number for execution in asked}
        for rank, number in running:
            if number not in stopping:
                self._engines.interrupt({rank: number})
        return bool(running)

    def restart(
        self,
        ranks: str | int | Iterable[int] | None = None,
        *,
        progress: Progress = unheard,
    ) -> None:
        """End the engines of some ranks, or of all, and start new ones in their place.

        A new engine has the rank, device and environment of the old one and joins the group, which
        is formed again; its variables are lost, those of the other ranks stay. What runs on them is
        interrupted. A rank that has died is replaced without being asked. A restart that is
        interrupted goes on in the background.

        Raises:
            PoolError: the pool was stopped or has lost its controller, or a new engine did not come
                up.
        """
        chosen = self.select_ranks(ranks)
        with self._forming:
            self._health.require_restartable()
            for rank in chosen:  # what it had is let go on purpose
                self._untold.pop(rank, None)
            late = time.monotonic() + self.options.timeout_s
            try:
                for attempt in range(_NUM_REPLACEMENTS):
                    num_losses = self._health.num_losses  # before `lost` is asked for
                    chosen = tuple(sorted({*chosen, *self._health.lost}))
                    listed = ", ".join(map(str, chosen))
                    try:
                        with stages.shown(progress, f"Starting rank {listed} again") as told:
                            ungrouped = self._replace(chosen, told)
                        break
                    except PoolError as error:  # of one that has died meanwhile, say
                        is_last = attempt == _NUM_REPLACEMENTS - 1 or time.monotonic() > late
                        if is_last or self._health.stopped:
                            reason = f"rank {listed} could not be started again: {error}"
                            self._health.give_up(reason, chosen)
                            raise PoolError(reason) from None
            except KeyboardInterrupt:  # it came at any point, and cannot mean half of a pool
                for rank in chosen:
                    self._lose(f"rank {rank} was restarted.", "", rank)
                raise
            self._health.mark_mended(chosen, num_losses)
            if ungrouped:
                self._health.give_up(ungrouped, ())
                self._health.require_usable()

    def sync_from(
        self, rank: int, *names: str, ranks: str | int | Iterable[int] | None = None
    ) -> tuple[int, ...]:
        """Give names on every other rank, or on `ranks`, the meaning they have on `rank`: after a
        rank was replaced, `pool.sync_from(0, "model", "optimizer", "scheduler")`.

        Name together what belongs together: it stays so. Modules, optimizers, schedulers and
        tensors that fit are changed in place, so that whatever refers to them sees it; else the
        name is bound to a copy. Gradients and the state of random generators are not copied.
        DistributedDataParallel models get fresh buckets on all ranks, also on `rank`.

        Returns:
            The ranks that have it now; none where there is no other rank.

        Raises:
            OptionsError: no name, or `ranks` are not others than `rank`.
            PoolError: the rank has no such variable, or it cannot be copied; nothing was changed.
            SpmdError: a rank failed meanwhile, or the user interrupted.
        """
        return sync_state(self, rank, names, ranks)

    def wait_for_restart(self) -> None:
        """Wait until no rank is being replaced, nor the group formed."""
        with self._forming:
            pass

    def status(self) -> PoolStatus:
        """The pool at this moment."""
        running = self._engines.running()
        state = self._health.state
        if state == "well":
            state = "busy" if running else "idle"
        return PoolStatus(
            state=state,
            reason=self._health.reason,
            backend=self.backend,
            generation=self.generation,
            ranks=self.ranks,
            pids=self._engines.pids,
            env=self.environment.fingerprints,
            idle_left_s=self._idle_left_s(),
            idle_warning_s=idle.warning_s(self.options.idle_timeout_s),
            idle_timeout_s=self.options.idle_timeout_s,
            training_ranks=self.training_ranks,
            training_backend=self.training_backend,
            why_cpu=self.why_cpu,
            replaced_after=tuple(dict.fromkeys(self._recovery.waits_for)),
            credentials=self.environment.credentials,
            inline=self.options.inline,
            calls=tuple(sorted({number for _, number in running if number is not None})),
        )

    def add_listener(self, listener: Callable[[PoolStatus], None]) -> None:
        """Call `listener(status)` when the pool breaks or is mended, stops soon or has stopped.

        It is called in a background thread. A listener that is added again is called once.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def log(self, rank: int, num_lines: int = 50) -> str:
        """The last lines of an engine's log: what it printed outside of cells."""
        text = redact(self._engines.log(self.select_ranks(rank)[0]), self.hidden_values())
        return "\n".join(text.splitlines()[-num_lines:])

    def stop(self, reason: str = "") -> None:
        """End every process of the pool. May be called again.

        Args:
            reason: told by the status from then on.
        """
        with presses.ignored():  # it would be half stopped, and not be stopped again
            if not self._health.end(reason):
                return
            self.environment.close()
            atexit.unregister(self._at_exit)
            if self._client is not None:
                self._client.close(linger=0)
            self._engines.stop()
        self.tell_listeners()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        status = self.status()
        return f"Pool({self.world_size} ranks, {self.backend}, {status.state})"

    # ---- what the folders above build on -------------------------------------------------

    def select_ranks(self, ranks: str | int | Iterable[int] | None) -> tuple[int, ...]:
        """The ranks meant by "all", "0:4", 3, [0, 2] or None (all), in ascending order."""
        if ranks is None:
            return tuple(r.rank for r in self.ranks)
        text = ranks if isinstance(ranks, (str, int)) else ",".join(map(str, ranks))
        return parse_ranks(str(text), self.world_size)

    def execute(
        self,
        name: str,
        payloads: Mapping[int, dict[str, Any]],
        on_output: OnOutput,
        timeout_s: float | None = None,
        on_interrupt: Callable[[], None] | None = None,
        on_notice: OnNotice | None = None,
    ) -> Execution:
        """Call an engine function on several ranks, supervised.

        Args:
            on_interrupt: called at the first `interrupt`, and at the first Ctrl-C by a pool that
                works in the caller's thread, which then cannot hear it itself; without it the ranks
                are interrupted.
            on_notice: hears what the user should know meanwhile; without it that is on stderr.
        """
        self.wait_until_usable()
        tell = NoticeLines() if on_notice is None else on_notice
        execution = Execution(self, name, payloads, on_output, timeout_s, tell)
        if on_interrupt is not None:
            self._stops[execution] = on_interrupt
        return execution

    def call(
        self,
        rank: int,
        name: str,
        payload: dict[str, Any],
        on_output: OnOutput | None = None,
        number: int | None = None,
    ) -> Future[Any]:
        """Call an engine function on one rank. Fails at once should the engine die meanwhile.

        `number` is by what `interrupt_calls` and `group.abort` know the call.
        """

        def on_message(kind: str, content: Any) -> None:
            if on_output is not None:
                if kind == "events":  # what else comes is masked by the recorder, chunk by chunk
                    content = redact_all(content, self.hidden_values())
                on_output(rank, kind, content)

        return self._engines.call(rank, name, payload, on_message, number)

    def send_comm(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message to a widget that a rank has made."""
        self._engines.send_comm(rank, message)

    def of_others(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that run what another client of ipyparallel has asked for."""
        return self._engines.of_others(ranks)

    def alive_ranks(self) -> list[int]:
        """The ranks whose engines have not died."""
        return self._engines.alive_ranks()

    def interrupt_calls(self, numbers: Mapping[int, int]) -> None:
        """Raise KeyboardInterrupt in calls, rank -> number; one that has ended is left alone."""
        self._engines.interrupt(numbers)

    def kill(self, rank: int, reason: str) -> None:
        """End the engine of a rank, whatever it does; it is replaced then.

        `reason` tells how the rank ended: "was killed, because ...".
        """
        self._engines.kill(rank, reason)

    def ask(
        self, request: str, ranks: Iterable[int], **content: Any
    ) -> dict[int, Future[dict[str, Any]]]:
        """Send a control request to some ranks: rank -> its answer, without those that are gone.

        The "status" of one that dies meanwhile is "died"; that of one that does not react never
        comes.
        """
        return self._engines.control(request, content, ranks)

    def new_file(self, name: str) -> Path:
        """A new path in the pool's private folder, which every rank of this host can read."""
        return self._engines.new_file(name)

    def hidden_values(self) -> Secrets:
        """The secret values that must not be shown: those of now and those that are sent later."""
        return self.environment.secrets

    def set_environment(self, variables: Mapping[str, str], unset: Sequence[str] = ()) -> None:
        """Set and remove variables on every rank, over the encrypted channel."""
        self.wait_until_usable()
        self.environment.set(variables, unset)

    def reform_group(self) -> None:
        """Form the group again, one generation higher, if every rank is there to join."""
        with self._forming:
            lacks_group, num_losses = self._health.lacks_group, self._health.num_losses
            if self._health.state != "well" and not lacks_group:
                return
            try:
                self._form_group()
            except EngineDiedError:
                pass  # it is being replaced, and the group formed then
            except PoolError as error:
                self._health.give_up(str(error), ())
            else:
                if lacks_group:
                    self._health.mark_mended((), num_losses)

    def give_up(self, reason: str, ranks: Iterable[int]) -> None:
        """From now on every run is refused with this reason, until these ranks are restarted."""
        self._health.give_up(reason, ranks)

    def require_usable(self) -> None:
        """Raise the PoolError that says why nothing can run here, if so."""
        self._health.require_usable()

    def wait_until_usable(self) -> None:
        """Wait for ranks that are just being replaced, then `require_usable`.

        Not for a thread that such a replacement may have to wait for.
        """
        self._recovery.wait()
        if self._health.lacks_group:  # another user has disturbed, say, and may have ended
            self.reform_group()
        self._health.require_usable()
        untold, self._untold = self._untold, {}
        for text in untold.values():
            NoticeLines()(text)

    def forget_listeners(self) -> None:
        """From now on nobody hears what becomes of the pool."""
        self._listeners.clear()

    def tell_listeners(self) -> None:
        """Have those who show the pool show it as it is now."""
        for listener in self._listeners:
            try:
                listener(self.status())
            except Exception:  # a picture that cannot be drawn must not keep an idle pool alive
                logging.getLogger("gpupool").exception("a listener of the pool failed")

    # ---- inside --------------------------------------------------------------------------

    def _make_engines(self) -> RankEngines:
        return Engines(self._on_loss)

    def _lock_gpus(self, uuids: Sequence[str], number: int) -> list[str]:
        return self._engines.lock_gpus(uuids, number, self.options.force)

    def _replace(self, ranks: Sequence[int], progress: Progress) -> str:
        """Start new engines for these ranks; why they then have no process group, or ""."""
        others = [rank for rank in self.alive_ranks() if rank not in ranks]
        for rank in ranks:
            how = self._health.lost.get(rank, "was restarted")
            self.variables.forget_ranks([rank], how)
        self._engines.restart(ranks, self.options.timeout_s, progress)
        self._engines.call_all("prepare", notebook_place(), ranks)
        for rank in ranks:
            self.environment.apply_to(rank)
        # The others may compute, or wait in the old group for a rank that is gone.
        busy = [rank for rank in self._engines.busy_ranks() if rank in others]
        self._engines.interrupt(dict.fromkeys(busy))
        self.group.abort(dict.fromkeys(others))
        try:
            self._form_group()
        except GroupError as error:
            return str(error)
        return ""

    def _replace_lost(self) -> None:
        """Replace the ranks that are gone, and those that go meanwhile."""
        with self._forming:
            for attempt in range(_NUM_REPLACEMENTS):
                num_losses = self._health.num_losses  # before `lost` is asked for
                lost = tuple(sorted(self._health.lost))
                if self._health.state != "replacing":
                    return
                try:
                    ungrouped = self._replace(lost, unheard)
                except Exception as error:  # of one more that has died, say
                    if attempt == _NUM_REPLACEMENTS - 1:
                        listed = ", ".join(map(str, lost))
                        reason = f"rank {listed} could not be started again: {error}"
                        self._health.give_up(reason, lost)
                else:
                    self._health.mark_mended(lost, num_losses)
                    if ungrouped:
                        self._health.give_up(ungrouped, ())

    def _form_group(self) -> None:
        self.group.form(self.backend, self.training_ranks, self.training_backend)

    def _on_loss(self, sentence: str, log_tail: str, rank: int | None, is_heard: bool) -> None:
        if rank is not None and not is_heard:
            lost = "It has been replaced; its variables are lost, the other ranks have theirs."
            self._untold[rank] = redact(f"{sentence} {lost}", self.hidden_values())
        self._lose(sentence, log_tail, rank)

    def _lose(self, sentence: str, log_tail: str, rank: int | None) -> None:
        """Note that a process is gone, and have its rank replaced."""
        self._health.lose(sentence, log_tail, rank)
        if rank is not None and self._is_up and self._health.state == "replacing":
            self._recovery.begin(rank, self.world_size)  # before a listener takes its time
        self.tell_listeners()

    def _idle_left_s(self) -> float | None:
        limit = self.options.idle_timeout_s
        if limit is None:
            return None
        # A rank that was given up is busy for ever; that must not keep a broken pool.
        if self._health.state == "well" and self._engines.busy_ranks():
            return limit
        return limit - (time.monotonic() - self._engines.last_used)


def _stop_at_exit(pool: Pool) -> Callable[[], None]:
    """Stop the pool when the interpreter ends; does not keep it alive until then.

    What is returned is registered with `atexit`.
    """
    reference = weakref.ref(pool)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.forget_listeners()  # what they draw on is going away, too
            alive.stop()

    return atexit.register(stop)
