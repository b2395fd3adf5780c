"""The words that CONTRIBUTING.md replaces are nowhere that readers look, nor are long sentences."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import words

ROOT = Path(__file__).parents[1]


def test_they_are_in_no_code_no_page_and_no_notebook() -> None:
    command = [sys.executable, "scripts/words.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("You are told once.", "told"),
        ("A lost rank is replaced by itself.", "by itself"),
        ("Training goes on.", "goes on"),
        ("It takes in what comes.", "takes in"),
        ("It lets go of the lock.", "lets go"),
        ("The group is made anew.", "anew"),
        ("a stand-in for the value", "stand-in"),
    ],
)
def test_each_is_found(text: str, word: str) -> None:
    assert [found for _, found, _ in words.finds(f"\n{text}")] == [word]


@pytest.mark.parametrize(
    "text",
    ["file.tell()", 'on_hang="tell"', "[--on-hang tell|abort]", "nobody can tell them apart",
     "a variable goes on the GPU", "as it goes one of three ways"],
)  # fmt: skip
def test_names_of_code_are_not(text: str) -> None:
    assert list(words.finds(text)) == []


def test_a_sentence_of_more_than_25_words_is_found_but_in_code_and_tables() -> None:
    most = "word " * 24 + "word."
    page = f"{most} One\nmore {most}\n\n- a {most}\n\n```\n{most[:-1]} {most}\n```\n| {most} |\n"
    page += f"| {most[:-1]} {most} |\n\n{most} {most}\n"
    assert [number for number, _ in words.long_sentences(page)] == [27, 26]


def test_the_glossary_has_them() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| instead of | write |")[1]
    rows = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \|$", table)
    listed = [re.sub(r" \(.*\)", "", row[0]).split(", ")[0] for row in rows if row[0] != "---"]
    assert len(listed) == len(words.INSTEAD)
    missing = [name for name in listed if not list(words.finds(f"they {name} it"))]
    assert missing == []
