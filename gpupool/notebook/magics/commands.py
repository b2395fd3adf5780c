"""The commands of %gpupool: call and display. Runs on the client."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING

from IPython.core.error import StdinNotImplementedError
from IPython.display import display

from gpupool.core.errors import OptionsError, PoolError, SpmdError
from gpupool.core.formatting import NONE, Table, rank_count
from gpupool.core.wire.calls import DebugCommand
from gpupool.core.wire.replies import DebugReply
from gpupool.notebook import pool_bar
from gpupool.notebook.magics import arguments
from gpupool.notebook.page.front_end import in_notebook
from gpupool.pool import session
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder
from gpupool.pool.calls.presses import ignore_for_a_moment, ignored

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool


class Interrupted(KeyboardInterrupt):
    """The user has interrupted a magic; in IPython this shows as one line, without our frames."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def run(line: str) -> object:
    """Do what stands behind `%gpupool`; without a word, show the status."""
    chosen = arguments.parse(line)
    try:
        return _COMMANDS[chosen.command](chosen)
    except KeyboardInterrupt:
        ignore_for_a_moment()
        raise Interrupted(f"%gpupool {chosen.command} was interrupted.") from None


def _status(chosen: Namespace) -> None:
    pool = session.find()
    if pool is None:
        print("No pool runs in this notebook. `%gpupool start` starts one.")
    elif in_notebook():
        pool_bar.show(pool)
    else:
        display(pool.status())


def _start(chosen: Namespace) -> None:
    options = {name: value for name, value in vars(chosen).items() if name != "command"}
    with pool_bar.StartProgress() as progress:
        pool = session.start(**options, progress=progress)
        progress.finish(pool_bar.status_text(pool.status()), pool)


def _stop(chosen: Namespace) -> None:
    # Presses do nothing meanwhile: a stop that is cut off half way would leave processes.
    with ignored():
        print("Pool stopped." if session.stop(down=chosen.down) else "No pool was running.")
    ignore_for_a_moment()  # a press that comes as it ends would say that it was interrupted


def _restart(chosen: Namespace) -> None:
    pool = session.current_pool()
    with pool_bar.StartProgress("Starting ranks again") as progress:
        pool.restart(chosen.ranks, progress=progress)
        progress.finish(pool_bar.status_text(pool.status()), pool)


def _sync(chosen: Namespace) -> None:
    ranks = session.current_pool().sync_from(chosen.rank, *chosen.variables, ranks=chosen.ranks)
    if not ranks:
        print("There is no other rank.")
        return
    names, listed = ", ".join(chosen.variables), ", ".join(map(str, ranks))
    has = "has" if len(ranks) == 1 else "have"
    print(f"Rank {listed} now {has} {names} of rank {chosen.rank}.")


def _interrupt(chosen: Namespace) -> None:
    is_any = session.current_pool().interrupt()
    print("Interrupted the busy ranks." if is_any else "No rank is busy.")


def _hosts(chosen: Namespace) -> None:
    if hosts := session.current_pool().hosts():
        columns = ("host", "state", "ranks", "GPUs", "address", "NCCL")
        rows = tuple(tuple(cell or NONE for cell in astuple(host)) for host in hosts)
        display(Table("Hosts", columns, rows))
    else:
        print("All ranks of the pool are on this machine.")


def _env(chosen: Namespace) -> None:
    pool = session.current_pool()
    if chosen.aws and chosen.unset:
        raise OptionsError("%gpupool env: --aws and --unset exclude each other.")
    if chosen.unset and not chosen.names:
        raise OptionsError("%gpupool env --unset: name the variables to remove.")
    variables: Mapping[str, str]
    if chosen.names or chosen.aws:
        variables = pool.propagate_env(*chosen.names, aws=chosen.aws, unset=chosen.unset)
        credentials = pool.status().credentials if chosen.aws else ""
    else:
        status = pool.status()
        variables, credentials = status.env, status.credentials
    ranks = rank_count(pool.world_size)
    if not variables:
        print("No variable matches." if chosen.unset else "No variable has been propagated.")
    elif chosen.unset:
        print(f"Removed from {ranks}: {', '.join(variables)}")
    else:  # names and fingerprints; values are not known here
        names = [f"{name} ({mark})" for name, mark in variables.items()]
        listed = "\n  ".join(["", *names]) if len(names) > 4 else f" {', '.join(names)}"
        print(f"On {ranks}:{listed}\n{credentials}".rstrip())


def _doctor(chosen: Namespace) -> object:
    from gpupool.training import doctor, machine  # `%load_ext gpupool` does not wait for it

    if doctor.last is not None and not chosen.place:
        return doctor.diagnose(doctor.last)
    url = "" if chosen.place == "machine" else chosen.place
    return machine.examine(session.current_pool(), url)


def _post_mortem(pool: Pool, chosen: str | None) -> None:
    """Ask for commands and show what the debugger says, until `q`, an interrupt or end of file.

    Where nobody can be asked, as in papermill, it shows where the rank was. The frames stay on the
    rank. Each command is a call of its own (`engine/cells/debug.py`), so that the rank waits for
    nobody, and an interrupt meets the command that runs.
    """
    rank = _choose(pool, chosen)
    is_open = _say(pool, rank, None)
    while is_open:
        try:
            # The kernel asks the front end for it, so it works where `%debug` does.
            line = input(f"ipdb[{rank}]> ")
        except (EOFError, KeyboardInterrupt, StdinNotImplementedError):
            line = "q"
        is_open = _say(pool, rank, line)


def _choose(pool: Pool, chosen: str | None) -> int:
    pool.wait_until_usable()
    if pool.status().state == "busy":
        raise PoolError("a cell is still running. Wait for it, or end it: `%gpupool interrupt`.")
    if chosen is None:
        if pool.last_error is None:
            raise PoolError("nothing has failed on the ranks of this pool: nothing to look at.")
        return pool.last_error.first.rank
    ranks = pool.select(chosen)
    if len(ranks) != 1:
        raise PoolError(f"%gpupool debug looks at one rank, and {chosen} means {len(ranks)}.")
    return ranks[0]


def _say(pool: Pool, rank: int, line: str | None) -> bool:
    """Give the debugger a command and print its answer; returns whether it waits for another."""
    recorder = OutputRecorder((rank,), pool.secrets)
    try:
        reply = Execution(pool, {rank: DebugCommand(line)}, recorder).result()[rank]
    except SpmdError as error:  # an interrupt that met the debugger itself, or the rank is gone
        print(f"*** {error.first}")
        pool.wait_until_usable()
        reply = DebugReply("", is_open=True)
    recorder.finish()
    print(reply.text + recorder.outputs[rank].text, end="", flush=True)
    for shown in recorder.outputs[rank].displays:
        display(shown["data"], raw=True)
    return reply.is_open


def _help(chosen: Namespace) -> None:
    parsers = {"": arguments.GPUPOOL, "spmd": arguments.SPMD, **arguments.COMMANDS}
    print(parsers[chosen.topic or ""].format_help(), end="")


_COMMANDS: Mapping[str, Callable[[Namespace], object]] = {
    "status": _status,
    "start": _start,
    "stop": _stop,
    "restart": _restart,
    "sync": _sync,
    "interrupt": _interrupt,
    "hosts": _hosts,
    "gpus": lambda chosen: session.gpus(),
    "env": _env,
    "log": lambda chosen: print(session.current_pool().log(chosen.rank, chosen.n)),
    "doctor": _doctor,
    "debug": lambda chosen: _post_mortem(session.current_pool(), chosen.rank),
    "help": _help,
}
