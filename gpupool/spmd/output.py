"""Fold what the ranks said: equal texts once. Pure; returns data. Runs on the client."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

MAX_ALIKE_CHARS = 200_000  # longer texts are the same only if they are equal
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{5,}")
_VARYING = re.compile(
    r"(?P<address>0x[0-9a-fA-F]{5,})"
    r"|(?P<id>\b(?:pid|tid|process|thread)[ =:#]{1,3}\d+|\bipykernel_\d+)"
    r"|(?P<clock>\b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?(?![\w:]))"
    r"|(?<![\w.])(?P<number>\d+(?:\.\d+)?)"
    r"(?P<unit> ?(?:ns|[uµ]s|ms|s|secs?|seconds|min|it/s|s/it)(?![\w/]))",
    re.IGNORECASE,
)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "min": 60.0}
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class NormalText:
    """A text without what differs from run to run; times are kept apart, to be compared.

    A rank that took a minute where others took a second has not said the same.
    """

    form: str
    times: tuple[float, ...]

    @classmethod
    def of(cls, text: str) -> NormalText:
        """The parts of a text."""
        times: list[float] = []

        def put_aside(match: re.Match[str]) -> str:
            kind = match.lastgroup
            if kind in ("address", "id"):
                return f"\0{kind}"
            if kind == "clock":
                parts = match["clock"].replace(",", ".").split(":")
                times.append(sum(float(p) * 60**n for n, p in enumerate(reversed(parts))))
                return "\0clock"
            unit = match["unit"].strip().lower()
            times.append(float(match["number"]) * _SECONDS.get(unit, 1.0))
            return "\0rate" if "/" in unit else "\0time"

        return cls(_VARYING.sub(put_aside, text), tuple(times))

    def is_like(self, other: NormalText) -> bool:
        """Whether the texts say the same, at about the same time."""
        # Equal forms have equally many times, hence `strict` cannot fail.
        return self.form == other.form and all(
            abs(ours - theirs) <= max(0.1, 0.25 * max(ours, theirs))
            for ours, theirs in zip(self.times, other.times, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that said the same; `text` is what the first of them said.

    `alike`: the others differ from it, but only in addresses, process ids and times.
    """

    ranks: tuple[int, ...]
    text: str
    alike: bool = field(default=False, repr=False)


def fold(texts: Mapping[int, str]) -> list[Group]:
    """The texts by rank with equal ones together, the largest group first, then by first rank.

    >>> fold({0: "a", 1: "b", 2: "b"})
    [Group(ranks=(1, 2), text='b'), Group(ranks=(0,), text='a')]
    """
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank], []).append(rank)
    groups = [Group(tuple(members), text) for text, members in ranks.items()]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def fold_alike(texts: Mapping[int, str]) -> list[Group]:
    """The groups of `fold`; texts that differ only in addresses, process ids and times are one.

    >>> fold_alike({0: "<A at 0x7f0011> in 1.02 s", 1: "<A at 0x7f3344> in 1.05 s"})
    [Group(ranks=(0, 1), text='<A at 0x7f0011> in 1.02 s')]
    """
    # Texts are compared after equal ones were folded: with 64 ranks that is one text mostly.
    merged: list[tuple[NormalText | None, list[Group]]] = []
    for group in fold(texts):
        normal = NormalText.of(group.text) if len(group.text) <= MAX_ALIKE_CHARS else None
        for found, members in merged:
            if found is not None and normal is not None and found.is_like(normal):
                members.append(group)
                break
        else:
            merged.append((normal, [group]))
    groups = []
    # Each group shows the text of its lowest rank: the same cell then reads the same next time.
    for _, members in merged:
        ranks = tuple(sorted(rank for group in members for rank in group.ranks))
        groups.append(Group(ranks, texts[ranks[0]], alike=len(members) > 1))
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def fold_displays(
    displays: Mapping[int, Sequence[Mapping[str, Any]]],
) -> list[tuple[tuple[int, ...], Mapping[str, Any]]]:
    """The mime bundles that ranks displayed with equal ones together, in order of appearance.

    A rank that displays the same thing twice has it twice.
    """
    found: dict[tuple[str, int], tuple[list[int], Mapping[str, Any]]] = {}
    for rank in sorted(displays):
        seen: Counter[str] = Counter()
        for bundle in displays[rank]:
            # the metadata says how to show it: a picture's size
            shown = [bundle["data"], bundle.get("metadata") or {}]
            content = _ADDRESS.sub("0x", json.dumps(shown, sort_keys=True, default=str))
            found.setdefault((content, seen[content]), ([], bundle))[0].append(rank)
            seen[content] += 1
    return [(tuple(ranks), bundle) for ranks, bundle in found.values()]


def majority(groups: Sequence[Group]) -> Group | None:
    """The group that the others differ from: more than half of the ranks, if there is one."""
    # The groups come sorted by size.
    if len(groups) < 2 or 2 * len(groups[0].ranks) <= sum(len(group.ranks) for group in groups):
        return None
    return groups[0]


def fold_lines(groups: Sequence[Group]) -> list[Group] | None:
    r"""The first lines of all ranks with equal ones together, then the second, ...

    None where the texts do not go together line by line: tables of numbers and tensors stay whole.

    >>> for group in fold_lines([Group((0,), "rank 0\nready"), Group((1,), "rank 1\nready")]):
    ...     print(group)
    Group(ranks=(0,), text='rank 0')
    Group(ranks=(1,), text='rank 1')
    Group(ranks=(0, 1), text='ready')
    """
    columns = [group.text.split("\n") for group in groups]
    if len(columns) < 2 or len(set(map(len, columns))) > 1 or any(g.alike for g in groups):
        return None
    rows = list(zip(*columns, strict=True))
    num_equal = sum(len(set(row)) == 1 for row in rows)
    if 2 * num_equal < len(rows) and not all(map(_is_one_form, rows)):
        return None
    folded: list[Group] = []
    for row in rows:
        by_rank = {r: line for group, line in zip(groups, row, strict=True) for r in group.ranks}
        # In the order of ranks, not of sizes: all rows read alike.
        folded += sorted(fold(by_rank), key=lambda group: group.ranks)
    return folded


def _is_one_form(row: Sequence[str]) -> bool:
    """Whether the lines are one sentence with other numbers."""
    forms = {_NUMBER.sub("0", line) for line in row}
    return len(forms) == 1 and any(map(str.isalpha, forms.pop()))


def differences(text: str, reference: str) -> set[int]:
    """The numbers of the lines in which `text` differs from `reference`.

    Addresses, process ids and times that differ are no difference, unless there is no other.

    >>> differences("device cpu\\nrows 6244", "device cpu\\nrows 6250")
    {1}
    """
    ours, theirs = text.split("\n"), reference.split("\n")
    normal = [[NormalText.of(line).form for line in lines] for lines in (ours, theirs)]
    # The texts differ, or nobody would ask: if not elsewhere, then in times and addresses.
    return _new_lines(*normal) or _new_lines(ours, theirs)


def _new_lines(ours: Sequence[str], theirs: Sequence[str]) -> set[int]:
    """The lines of ours that theirs do not have there."""
    # autojunk would ignore lines that are frequent in long texts, as an epoch's are
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    changes = [one for one in matcher.get_opcodes() if one[0] in ("replace", "insert")]
    return {n for _, _, _, start, end in changes for n in range(start, end)}
