"""The commands of %gpupool: call and display. Runs on the client."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping

from IPython.display import display

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics import arguments, debug
from gpupool.notebook.page.front_end import in_notebook
from gpupool.notebook.pool import pool_bar, tables
from gpupool.notebook.pool.bar import status_text
from gpupool.pool import session
from gpupool.pool.calls.presses import ignore_for_a_moment, ignored

_AFTER = {  # what an interrupted command has left
    "start": " Nothing was left running.",
    "restart": " It continues in the background.",
}


class Interrupted(KeyboardInterrupt):
    """The user has interrupted a magic; in IPython this shows as one line, without our frames."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback."""
        return [f"KeyboardInterrupt: {self}"]


def run(line: str) -> object:
    """Do what stands behind `%gpupool`; without a word, show the status.

    Raises:
        OptionsError: there is no such command, or its arguments are wrong.
        Interrupted: by the user.
    """
    chosen = arguments.parse(line)
    try:
        return _COMMANDS[chosen.command](chosen)
    except KeyboardInterrupt:
        ignore_for_a_moment()
        after = _AFTER.get(chosen.command, "")
        raise Interrupted(f"%gpupool {chosen.command} was interrupted.{after}") from None


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
    with tables.StartProgress() as progress:
        pool = session.start(**options, progress=progress)
        progress.finish(status_text(pool.status()), pool)


def _stop(chosen: Namespace) -> None:
    # Presses do nothing meanwhile: a stop that is cut off half way would leave processes.
    with ignored():
        print("Pool stopped." if session.stop(down=chosen.down) else "No pool was running.")
    ignore_for_a_moment()  # a press that comes as it ends would say that it was interrupted


def _restart(chosen: Namespace) -> None:
    pool = session.current_pool()
    failed = "The restart was not completed."
    with tables.StartProgress("Starting ranks again", failed) as progress:
        pool.restart(chosen.ranks, progress=progress)
        progress.finish(status_text(pool.status()), pool)


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
        display(tables.hosts_shown(hosts), raw=True)
    else:
        print("All ranks of the pool are on this machine.")


def _env(chosen: Namespace) -> None:
    pool = session.current_pool()
    if chosen.aws and chosen.unset:
        raise OptionsError("%gpupool env: --aws and --unset exclude each other.")
    if chosen.unset and not chosen.names:
        raise OptionsError("%gpupool env --unset: name the variables to remove.")
    is_changed = chosen.names or chosen.aws
    if is_changed:
        env = pool.propagate_env(*chosen.names, aws=chosen.aws, unset=chosen.unset)
    status = pool.status()
    credentials = status.credentials if chosen.aws or not is_changed else ""
    variables = env if is_changed else status.env
    print(tables.env_text(variables, pool.world_size, chosen.unset, credentials))


def _doctor(chosen: Namespace) -> object:
    from gpupool.training import doctor, machine  # `%load_ext gpupool` does not wait for it

    if doctor.last is not None and not chosen.place:
        return doctor.diagnose(doctor.last)
    url = "" if chosen.place == "machine" else chosen.place
    return machine.examine(session.current_pool(), url)


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
    "doctor": _doctor,
    "debug": lambda chosen: debug.post_mortem(session.current_pool(), chosen.rank),
    "help": _help,
}
