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
    r"0x[0-9a-f]{5,}"
    r"|\b(?:pid|tid|process|thread)[ =:#]{1,3}\d+|\bipykernel_\d+"
    r"|\b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?(?![\w:])"
    r"|(?<![\w.])\d+(?:\.\d+)? ?(?:ns|[uµ]s|ms|s|secs?|seconds|min|it/s|s/it)(?![\w/])",
    re.IGNORECASE,
)


def normal(text: str) -> str:
    """A text without what differs from run to run: addresses, process ids, times.

    >>> normal("<A at 0x7f0011> in 1.02 s") == normal("<A at 0x7f3344> in 2 min")
    True
    """
    return _VARYING.sub("\0", text) if len(text) <= MAX_ALIKE_CHARS else text


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that said the same; `text` is what the first of them said. `alike`: the others differ
    from it, but only in addresses, process ids and times."""

    ranks: tuple[int, ...]
    text: str
    alike: bool = field(default=False, repr=False)


def fold(texts: Mapping[int, str], *, alike: bool = False) -> list[Group]:
    """The texts by rank with equal ones together, or `alike` ones: see `Group`. The largest group
    comes first, of equal ones that with the first rank."""
    # Each text once: with 64 ranks that is one mostly.
    forms = {text: normal(text) if alike else text for text in {*texts.values()}}
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(forms[texts[rank]], []).append(rank)
    groups = [
        Group(tuple(members), texts[members[0]], len({texts[rank] for rank in members}) > 1)
        for members in ranks.values()
    ]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def fold_displays(
    displays: Mapping[int, Sequence[Mapping[str, Any]]],
) -> list[tuple[tuple[int, ...], Mapping[str, Any]]]:
    """The mime bundles that ranks displayed with equal ones together, in order of appearance; what
    a rank displays twice is there twice."""
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
    if 2 * sum(len(set(row)) == 1 for row in rows) < len(rows):
        return None
    folded: list[Group] = []
    for row in rows:
        by_rank = {r: line for group, line in zip(groups, row, strict=True) for r in group.ranks}
        # In the order of ranks, not of sizes: all rows read alike.
        folded += sorted(fold(by_rank), key=lambda group: group.ranks)
    return folded


def differences(text: str, reference: str) -> set[int]:
    """The numbers of the lines that `text` has and `reference` has not there.

    Addresses, process ids and times that differ are no difference.

    >>> differences("device cpu\\nrows 6244", "device cpu\\nrows 6250")
    {1}
    """
    theirs, ours = (list(map(normal, one.split("\n"))) for one in (reference, text))
    # autojunk would ignore lines that are frequent in long texts, as an epoch's are
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    changes = [one for one in matcher.get_opcodes() if one[0] in ("replace", "insert")]
    return {n for _, _, _, start, end in changes for n in range(start, end)}
