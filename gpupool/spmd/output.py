"""Fold what the ranks said: equal texts once. Pure; returns data. Runs on the client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that said exactly the same."""

    ranks: tuple[int, ...]
    text: str


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
            content = json.dumps([bundle["data"], bundle.get("metadata") or {}], sort_keys=True)
            found.setdefault((content, seen[content]), ([], bundle))[0].append(rank)
            seen[content] += 1
    return [(tuple(ranks), bundle) for ranks, bundle in found.values()]


def majority(groups: Sequence[Group]) -> Group | None:
    """The group that the others differ from: the one larger than every other, if there is one."""
    if len(groups) < 2 or len(groups[0].ranks) == len(groups[1].ranks):
        return None
    return groups[0]


def different_lines(text: str, reference: str) -> frozenset[int]:
    """The numbers, from 0, of the lines of `text` that `reference` does not have there.

    >>> sorted(different_lines("device cpu\\nrows 3", "device cpu\\nrows 2"))
    [1]
    """
    ours, theirs = text.split("\n"), reference.split("\n")
    matching = SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
    same = {line for block in matching for line in range(block.b, block.b + block.size)}
    return frozenset(range(len(ours))) - same


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as short text, runs of three and more with a dash.

    >>> format_ranks([0, 1, 2, 3, 5, 6, 8])
    '0-3, 5, 6, 8'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))
    return ", ".join(parts)


def tail(lines: Iterable[tuple[int, str]], num_lines: int) -> list[tuple[tuple[int, ...], str]]:
    """The last lines in order of arrival, the same line from several ranks in a row as one."""
    folded: list[tuple[tuple[int, ...], str]] = []
    for rank, line in lines:
        if folded and folded[-1][1] == line and rank not in folded[-1][0]:
            folded[-1] = (*folded[-1][0], rank), line
        else:
            folded.append(((rank,), line))
    return folded[-num_lines:]
