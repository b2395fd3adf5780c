"""%gpupool debug: a post-mortem on a rank, through the notebook's own input. Runs on the client.

The frames stay on the rank; each command is a call of its own (`gpupool/engine/cells/debug.py`),
so that the rank waits for nobody, and an interrupt meets the command that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import display

from gpupool.core.errors import PoolError, SpmdError
from gpupool.core.wire.calls import DebugCommand
from gpupool.core.wire.replies import DebugReply
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool


def post_mortem(pool: Pool, chosen: str | None) -> None:
    """Ask for commands and show what the debugger says, until `q`, an interrupt or end of file.

    Args:
        chosen: the rank; None for the one that failed first in the last cell that failed.

    Raises:
        PoolError: there is nothing to look at, a rank is busy, or nobody can be asked for input.
    """
    rank = _choose(pool, chosen)
    is_open = _say(pool, rank, None)
    while is_open:
        try:
            # The kernel asks the front end for it, so it works where `%debug` does.
            line = input(f"ipdb[{rank}]> ")
        except (EOFError, KeyboardInterrupt):
            line = "q"
        except RuntimeError:  # this front end cannot be asked for input, and IPython says so
            _say(pool, rank, "q")
            raise
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
