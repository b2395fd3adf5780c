"""Numbers, times and names as people read them. Pure; runs anywhere."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

NONE = "–"  # where there is no value

# These are shares of a whole, and so are those of users and of torchmetrics that are called so.
_SHARE = re.compile(
    "(accuracy|top5|precision|recall|f1(score)?|auc|auroc|iou|dice)$", re.IGNORECASE
)


def duration(seconds: float) -> str:
    """
    >>> duration(8.24), duration(70), duration(7500)
    ('8.2 s', '1 min 10 s', '2 h 5 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float) -> str:
    """
    >>> number(3383818), number(999)
    ('3,383,818', '999')
    """
    return f"{value:,.0f}"


def rank_count(count: int) -> str:
    """
    >>> rank_count(1), rank_count(2)
    ('1 rank', '2 ranks')
    """
    return f"{count} rank{'' if count == 1 else 's'}"


def format_ranks(ranks: Iterable[int], hosts: Mapping[int, str] | None = None) -> str:
    """Ranks as short text, runs of three and more with a dash; host by host where these are known.

    >>> format_ranks([0, 1, 2, 3, 5, 6, 8])
    '0-3, 5, 6, 8'
    >>> format_ranks([2, 3, 4], {2: "gpu1", 3: "gpu1", 4: "gpu2"})
    '2, 3 (gpu1), 4 (gpu2)'
    """
    if hosts:
        on = groupby(sorted(ranks), lambda rank: hosts.get(rank, ""))
        return ", ".join(f"{format_ranks(some)}{f' ({host})' * bool(host)}" for host, some in on)
    parts: list[str] = []
    # what grows by one each has the same distance to its place
    for _, found in groupby(enumerate(sorted(ranks)), lambda one: one[1] - one[0]):
        run = [rank for _, rank in found]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)


def done_of(done: int, total: int, unit: str) -> str:
    """
    >>> done_of(1200, 10_000, "samples"), done_of(12_300_000, 98_000_000, "B"), done_of(7, 0, "")
    ('1,200 of 10,000 samples', '12.3 of 98.0 MB', '')
    """
    if not total:
        return ""
    if unit == "B":
        return f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
    return f"{done:,} of {total:,} {unit}".rstrip()


def percent(share: float | None, digits: int = 1) -> str:
    """A share (0..1) in percent; a dash where there is none.

    >>> percent(0.6213), percent(0.6213, 0)
    ('62.1 %', '62 %')
    """
    return NONE if share is None else f"{share:.{digits}%}".replace("%", " %")


def is_share(name: str) -> bool:
    """Whether values of that name are shares of a whole (0..1), which are shown in percent.

    >>> is_share("mask/mean_iou"), is_share("MulticlassF1Score"), is_share("mae")
    (True, True, False)
    """
    return bool(_SHARE.search(name))


def measured(name: str, value: float | None) -> str:
    """A metric in four digits, in percent if it is a share; a dash where there is none.

    >>> measured("f1", 0.875), measured("rmse", 0.875), measured("own_accuracy", 87.5)
    ('87.5 %', '0.875', '87.5')
    """
    if value is None:
        return NONE
    # A function of the user's with such a name may count in percent already.
    return percent(value) if is_share(name) and 0 <= value <= 1 else f"{value:.4g}"


def clock_time(seconds: float) -> str:
    """A wall clock's time (seconds since 1970) where the notebook is, as "10:42:17"."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def shortened(text: str, limit: int = 200) -> str:
    """The first line of `text`, cut to `limit` characters."""
    line = text.strip().split("\n")[0] or "no message"
    return line if len(line) <= limit else line[: limit - 1] + "…"


def short_name(name: str, limit: int) -> str:
    """A name in at most `limit` characters: its middle is left out, as both ends tell it apart.

    >>> short_name("golden_retriever_puppy", 11)
    'golde…puppy'
    """
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[: limit - 1 - half]}…{name[-half:]}"


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.052), milliseconds(0.00123), milliseconds(2.345)
    ('52 ms', '1.23 ms', '2.3 s')
    """
    return duration(seconds) if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def of_memory(used: int | None, total: int | None) -> str:
    """
    >>> of_memory(57 << 30, 139 << 30), of_memory(None, None)
    ('57 of 139 GiB', '–')
    """
    if used is None:
        return NONE
    size = used / 2**30
    shown = f"{size:.0f}" if size >= 9.95 else f"{size:.1f}"
    return f"{shown} of {total / 2**30:.0f} GiB" if total else f"{shown} GiB"


def text_table(lines: Iterable[Sequence[str]]) -> str:
    """Rows of cells, the first one their header, as columns of text.

    >>> text_table([("name", "n"), ("a", "12")])
    'name  n\\na     12'
    """
    rows = [*lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return text_table([self.columns, *self.rows])
