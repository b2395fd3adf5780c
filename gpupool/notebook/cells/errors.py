"""What the ranks of a cell raised, as HTML. Pure functions; runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.errors import RankError, SpmdError
from gpupool.notebook.page import ansi, markup
from gpupool.spmd.output import normal


def errors_html(error: SpmdError | None) -> list[str]:
    """The rank that failed first, open; the others folded by equal traceback."""
    if error is None:
        return []
    if error.by_user:  # nothing has failed, so there is nothing to look into
        words = escape(error.interrupted_text()).replace("; ", "<br>")
        return [markup.bar(words, markup.AMBER)]
    groups: dict[tuple[object, str], list[RankError]] = {}
    first = error.first
    # A dict keeps this order, so the cause comes first and those who only waited come last.
    for one in sorted(error.errors.values(), key=lambda e: (e is not first, e.freed, e.rank)):
        # of those that were freed each names the port or peer that it lost
        text = one.freed_from if one.freed else normal(ansi.plain(one.traceback))
        groups.setdefault((one.freed or one.ename, text), []).append(one)
    return [_block(errors, error) for errors in groups.values()]


def _block(errors: list[RankError], error: SpmdError) -> str:
    first = errors[0]
    is_cause = first is error.first
    title = f"<b>[{escape(error.named(e.rank for e in errors))}]</b> "
    if first.freed:
        title += escape(first.freed_from)
    else:
        colour = markup.ink(markup.RED) if is_cause else "inherit"
        title += f'<b style="color:{colour}">{escape(first.ename)}</b> '
        title += markup.muted(_headline(first))
    notes = []
    if is_cause and len(error.errors) > len(errors):
        notes.append("failed first")
    if len(errors) > 1:
        notes.append(f"same traceback on {len(errors)} ranks{'' if is_cause else ', folded'}")
    if notes:
        title += markup.muted(f" ({', '.join(notes)})")
    text = "\n\n".join(filter(None, (_without_title(first), first.hint)))
    if text:
        title = markup.fold_out(title, markup.code_html(ansi.to_html(text)), is_open=is_cause)
    return markup.bar(title, markup.AMBER if first.freed else markup.RED)


def _without_title(error: RankError) -> str:
    """The traceback without what the title says: IPython's first lines, and the message at its end.

    Its rule of dashes is as wide as a terminal, and wraps in a narrow page.
    """
    lines = (error.traceback.strip("\n") or f"{error.ename}: {error.evalue}").split("\n")
    if len(lines) > 1 and set(ansi.plain(lines[0])) == {"-"}:
        del lines[:2]
    # A message of several lines, or one that the title cuts, is said in full here.
    if lines and ansi.plain(lines[-1]).strip() == f"{error.ename}: {_headline(error)}".strip(": "):
        del lines[-1]
    return "\n".join(lines).strip("\n")


def _headline(error: RankError) -> str:
    line = ansi.plain(error.evalue).strip().partition("\n")[0]
    return line if len(line) <= 160 else line[:159] + "…"
