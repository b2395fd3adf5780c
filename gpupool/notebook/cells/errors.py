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
    return [_block(errors, error) for errors in _groups(error)]


def _groups(error: SpmdError) -> list[list[RankError]]:
    """The errors with equal ones together, that of the first rank first, freed ones last."""
    groups: dict[tuple[object, ...], list[RankError]] = {}
    first = error.first
    # A dict keeps this order, so the cause comes first and those who only waited come last.
    for one in sorted(error.errors.values(), key=lambda e: (e is not first, e.freed, e.rank)):
        # of those that were freed each names the port or peer that it lost
        text = one.freed_from if one.freed else normal(ansi.plain(one.traceback))
        groups.setdefault((one.freed, one.freed or one.ename, text), []).append(one)
    return list(groups.values())


def _block(errors: list[RankError], error: SpmdError) -> str:
    first = errors[0]
    is_cause = first is error.first
    ranks = f"<b>[{escape(error.named(e.rank for e in errors))}]</b> "
    if first.freed:
        title = ranks + escape(_one_line(first))
    else:
        colour = markup.ink(markup.RED) if is_cause else "inherit"
        name = f'<b style="color:{colour}">{escape(first.ename)}</b>'
        title = ranks + name + " " + markup.muted(_headline(first))
    notes = []
    if is_cause and len(error.errors) > len(errors):
        notes.append("failed first")
    if len(errors) > 1:
        notes.append(f"same traceback on {len(errors)} ranks{'' if is_cause else ', folded'}")
    if notes:
        title += markup.muted(f" ({', '.join(notes)})")
    text = _without_title(first) if first.traceback.strip() else f"{first.ename}: {first.evalue}"
    if text == f"{first.ename}: {_headline(first)}":  # the title says it
        text = ""
    text = "\n\n".join(filter(None, (text, first.hint)))
    inner = title
    if text:
        inner = markup.fold_out(title, markup.code_html(ansi.to_html(text)), is_open=is_cause)
    return markup.bar(inner, markup.RED if not first.freed else markup.AMBER)


def _without_title(error: RankError) -> str:
    """The traceback without what the title says: IPython's first lines, and the message at its end.

    Its rule of dashes is as wide as a terminal, and wraps in a narrow page.
    """
    lines = error.traceback.strip("\n").split("\n")
    plain = [ansi.plain(line) for line in lines]
    if plain[0] and not plain[0].strip("-") and len(lines) > 1:
        del lines[:2], plain[:2]
    # A message of several lines, or one that the title cuts, is said in full here.
    if plain and plain[-1].strip() == f"{error.ename}: {_headline(error)}".strip(": "):
        del lines[-1]
    return "\n".join(lines).strip("\n")


def _one_line(error: RankError) -> str:
    return error.freed_from if error.freed else _short(str(error))


def _headline(error: RankError) -> str:
    return _short(error.evalue)


def _short(text: str) -> str:
    line = ansi.plain(text).strip().partition("\n")[0]
    return line if len(line) <= 160 else line[:159] + "…"
