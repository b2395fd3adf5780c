"""Finds words that CONTRIBUTING.md replaces by others, and sentences that are too long.

Words in the package, the pages and the notebooks; sentences in pages and notebooks. `make lint`
runs it: a line for each find, and exit status 1 if there is one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"\btold\b|\btells?\b(?!.* apart\b)": "report, emit, log; reported",
    r"\bby itself\b": "automatically",
    r"\b(?:take|takes) in\b": "add, receive",
    r"\b(?:let|lets) go\b": "release",
    r"\bsettle[sd]?\b": "finish, resolve",
    r"\b(?:go|goes|went|gone) on\b(?! (?:to|the|a|an|top|its|their)\b)": "resume, continue",
    r"\banew\b": "again",
    r"\bwhereabouts\b": "location",
    r"\bcompanions?\b": "hook",
    r"\bstand-ins?\b": "placeholder",
}
# Names of code: a method of files, a key in checkpoints, the word of an option.
_CODE = re.compile(
    r"\.tell\b|(?:def|const) tell\b|\btell\(\)|[\"'`](?:told|tell)[\"'`]"
    r"|tell[|,]abort|\btell \(the default\)"
)
MAX_WORDS = 25  # in a sentence
_NO_PROSE = re.compile(r"```.*?```|<[^>]*>|^ *\|.*?$", re.DOTALL | re.MULTILINE)
_END = re.compile(r"(?<=[.?!:;])[)\"*]*\s+|\n\s*\n|\n(?= *(?:[-*#]|\d+\.) )")
_WORDS = {re.compile(words, re.IGNORECASE): better for words, better in INSTEAD.items()}


def finds(text: str) -> Iterator[tuple[int, str, str]]:
    """Number of the line, the word, and what to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        bare = _CODE.sub("", line)
        for word, better in _WORDS.items():
            for found in word.finditer(bare):
                yield number, found[0], better


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Number of words and beginning of each sentence of a page that has too many.

    Colons and semicolons end one too. Code, tables and HTML have no sentences.
    """
    for sentence in _END.split(_NO_PROSE.sub("\n\n", text)):
        words = re.findall(r"\w\S*", sentence)
        if len(words) > MAX_WORDS:
            yield len(words), " ".join(words[:8])


def texts() -> Iterator[tuple[Path, str]]:
    """What readers see: code with its comments, pages, and the text cells of notebooks."""
    package = [*ROOT.glob("gpupool/**/*.py"), *ROOT.glob("gpupool/**/*.js")]
    pages = [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "SECURITY.md"))]
    for path in sorted([*package, *pages, ROOT / "ARCHITECTURE.md"]):
        yield path, path.read_text()
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        yield path, "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def main() -> int:
    """Print the finds; 1 if there are any."""
    status = 0
    for path, text in texts():
        for number, word, better in finds(text):
            print(f"{path.relative_to(ROOT)}:{number}: {word!r}; write {better}")
            status = 1
        if path.suffix in (".md", ".ipynb"):
            for number, beginning in long_sentences(text):
                print(f"{path.relative_to(ROOT)}: {number} words in a sentence: {beginning} ...")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
