"""`%gpupool auto on`: every following cell runs on the ranks. Runs on the client.

A transformer of IPython's input puts `%%spmd` above the cell; nothing of the shell is replaced. It
looks only at what the user sends as a cell: what a front end asks for silently, and what a magic
runs inside, stays in the notebook. So do cells about the notebook itself (`stays_here`).
"""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.display import display

from gpupool.core.errors import PoolError
from gpupool.core.formatting import format_ranks
from gpupool.notebook.magics.arguments import auto_options
from gpupool.notebook.page import markup
from gpupool.pool import session

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool

LOCAL = "%%local"
# a line of these anywhere in the cell: it is about the pool
_OURS = re.compile(r"^(?:[\w., ]+=\s*)?%(?:gpupool|spmd)\b", re.MULTILINE)
# a first line of these: it is about the notebook, its extensions and its history
_NOTEBOOKS = re.compile(
    r"^%(?:(?:re|un)?load_ext|load|loadpy|save|edit|notebook|history|hist|recall|rerun|rep|macro"
    r"|logstart|logstop|logon|logoff|logstate|connect_info|qtconsole|config|xmode|colors|tb|debug"
    r"|lsmagic|magic|quickref|store|alias_magic)\b"
)
_AUTORELOAD = re.compile(r"^%(?:re)?load_ext\s+autoreload\b")  # modules are imported on the ranks


@dataclass
class Auto:
    """The mode of one shell."""

    shell: Any
    options: str = ""  # of %%spmd, as they were typed
    ranks: tuple[int, ...] = ()  # where cells run
    pool: Pool | None = None  # None: the mode is off

    @property
    def is_on(self) -> bool:
        """Whether cells go to the ranks."""
        return self.pool is not None

    def describe(self) -> str:
        """The state in one sentence."""
        if self.pool is None:
            return "auto is off: cells run in the notebook unless they begin with %%spmd."
        return (
            f"auto is on: every cell runs on rank {format_ranks(self.ranks)}"
            f"{' with ' + self.options if self.options else ''}. {LOCAL} as a cell's first line "
            "runs it in the notebook; so does a line with %gpupool. `%gpupool auto off` ends it."
        )

    def label(self) -> str:
        """What stands in the prompt, or above the output."""
        num = len(self.ranks)
        return f"{num} rank{'s' if num != 1 else ''}"

    def turn_on(self, pool: Pool, ranks: tuple[int, ...], options: str) -> None:
        """From the next cell on."""
        self.pool, self.ranks, self.options = pool, ranks, options
        if _has_prompt(self.shell):
            from gpupool.notebook.magics.auto_prompts import (
                AutoPrompts,  # brings prompt_toolkit along
            )

            if not isinstance(self.shell.prompts, AutoPrompts):
                self.shell.prompts = AutoPrompts(self.shell, self.shell.prompts, self.label)

    def turn_off(self) -> bool:
        """From the next cell on; returns whether it was on."""
        was_on, self.pool = self.is_on, None
        if was_on and _has_prompt(self.shell):
            from gpupool.notebook.magics.auto_prompts import AutoPrompts

            if isinstance(self.shell.prompts, AutoPrompts):
                self.shell.prompts = self.shell.prompts.users
        return was_on

    def require_pool(self) -> None:
        """Raise a PoolError if the ranks are out of reach; the mode is off then."""
        pool = self.pool
        if pool is None:
            return
        try:
            if session.find() is not pool:
                reason = pool.status().reason
                raise PoolError(
                    f"the pool was stopped{' (' + reason + ')' if reason else ''}.", "stopped"
                )
            pool.wait_until_usable()
        except PoolError as error:
            self.turn_off()
            raise PoolError(
                f"{error}\nThis cell was not run. auto is off now: the next cells run in the "
                "notebook. `%gpupool auto on` puts it on again once the pool works.",
                error.kind,
                *error.names,
                ranks=error.ranks,
            ) from None

    def show_sign(self) -> None:
        """Say above a cell's output where it runs, where no prompt of ours does."""
        if not _has_prompt(self.shell):
            text = f"auto: {self.label()}"
            html = f'<div style="{markup.FONT}">{markup.muted(text)}</div>'
            display({"text/plain": text, "text/html": html}, raw=True)

    def transform(self, lines: list[str]) -> list[str]:
        """The cell's lines as they are to run; IPython calls this for all that it runs."""
        # IPython also transforms what a magic runs within a cell: the body of `%%time`, say.
        if not lines or _in_a_cell():
            return lines
        # Also while auto is off: the line must not become an error when the mode is.
        if lines[0].rstrip() == LOCAL:
            rest = lines[1:]
            # a comment keeps the numbers of the lines; a cell magic has to be the first
            return rest if rest and rest[0].startswith("%%") else ["# %%local\n", *rest]
        source = "".join(lines)
        if not self.is_on or stays_here(source, self.shell) or not _is_users_cell(self.shell):
            return lines
        return [f"%%spmd --auto {self.options}".rstrip() + "\n", *lines]


def stays_here(source: str, shell: Any) -> bool:
    """Whether a cell runs in the notebook although auto is on.

    Cells of gpupool's own, of commands on the notebook, and of cell magics that an extension has
    brought to the notebook (`%%sql`): the ranks do not know these. IPython's own (`%%time`,
    `%%bash`) run on the ranks.
    """
    first = source.split("\n", 1)[0].rstrip()
    if not source.strip() or _OURS.search(source):
        return True
    if first.startswith("%%"):
        name = first[2:].split()[0] if first[2:].split() else ""
        # A magic that nobody knows here goes to the ranks, whose error names it.
        magic = shell.magics_manager.magics["cell"].get(name)
        module = getattr(magic, "__module__", "") or ""
        return name == "spmd" or (magic is not None and not module.startswith("IPython."))
    return bool(_NOTEBOOKS.match(first)) and not _AUTORELOAD.match(first)


def of(shell: Any) -> Auto:
    """The mode of this shell."""
    # On the shell: each has its own mode, and all who ask for it find the same one.
    if not isinstance(getattr(shell, "_gpupool_auto", None), Auto):
        shell._gpupool_auto = Auto(shell)
    mode: Auto = shell._gpupool_auto
    return mode


def command(shell: Any, line: str, pool: Pool | None) -> str:
    """`%gpupool auto ...`; returns the sentence to print. `pool` is needed for "on"."""
    chosen = auto_options(line)
    mode = of(shell)
    if chosen.state == "on":
        assert pool is not None
        mode.turn_on(pool, pool.select_ranks(chosen.ranks), chosen.options)
    elif chosen.state == "off":
        mode.turn_off()
    return mode.describe()


def register(shell: Any) -> None:
    """Have the shell ask us about every cell."""
    unregister(shell)
    shell.input_transformers_cleanup.append(_Transformer(of(shell)))


def unregister(shell: Any) -> None:
    """Have it ask no more; the mode is off, which is said if it was on."""
    if of(shell).turn_off():
        print("auto is off: gpupool was unloaded. `%gpupool auto on` puts it on again.")
    transformers = shell.input_transformers_cleanup
    transformers[:] = [t for t in transformers if not isinstance(t, _Transformer)]


class _Transformer:
    """What IPython calls with a cell's lines."""

    # IPython does not ask it whether a cell that is being typed is complete
    has_side_effects = True

    def __init__(self, mode: Auto) -> None:
        self._mode = mode

    def __call__(self, lines: list[str]) -> list[str]:
        return self._mode.transform(lines)


def _has_prompt(shell: Any) -> bool:
    return hasattr(shell, "prompts") and getattr(shell, "kernel", None) is None


def _in_a_cell() -> bool:
    """Whether a cell's code runs in this thread: a magic that runs its body, say."""
    # IPython has no flag for it; `run_code` is the method in which all code of cells runs.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run_code" and code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False


def _is_users_cell(shell: Any) -> bool:
    """Whether what is being run is a cell that the user has sent, as far as is known."""
    # Cells run in the main thread: what another one runs is no cell of the user's.
    if threading.current_thread() is not threading.main_thread():
        return False
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return True
    request = kernel.get_parent("shell") or {}
    content = request.get("content", {})
    if request.get("header", {}).get("msg_type") != "execute_request":
        return False
    # Front ends send code of their own (variable viewers) silently, or outside of the history.
    return not content.get("silent") and bool(content.get("store_history", True))
