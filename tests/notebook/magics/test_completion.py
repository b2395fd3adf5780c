"""What the Tab key offers after our magics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import gpupool
from gpupool.notebook.magics.completion import Words, complete

WORDS: Words = {
    "profile": lambda: ["local", "slurm"],
    "env": lambda: ["AWS_A", "AWS_B", "HOME"],
    "names": lambda: ["AWS_A", "AWS_B", "HOME"],
    "rank": lambda: ["0", "1"],
    "ranks": lambda: ["all", "0", "1"],
}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%gpupool st", ["status", "start", "stop"]),
        ("%gpupool start --backend ", ["auto", "nccl", "gloo"]),
        ("%gpupool start --env --b", []),  # a name has to come first
        ("%gpupool start --cpu --c", []),  # an option is offered once
        ("%gpupool env AWS", ["AWS_A", "AWS_B"]),
        ("%gpupool env AWS_A AWS", ["AWS_B"]),
        ("%gpupool sync ", ["0", "1", "-t", "--targets"]),
        ("%gpupool log ", ["0", "1", "-n"]),
        ("%gpupool help sta", ["status", "start"]),
        ("%%spmd -t ", ["all", "0", "1"]),
        ("%%spmd --targets 0 --n", ["--nowait", "--no-sync"]),
        ("%gpupool nonsense ", []),
        ("", []),
    ],
)
def test_offered_words(line: str, words: list[str]) -> None:
    assert complete(line, WORDS) == words


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell()
    gpupool.load_ipython_extension(shell)
    yield shell
    gpupool.unload_ipython_extension(shell)


def offered(shell: InteractiveShell, text: str) -> list[str]:
    with provisionalcompleter():
        found = list(shell.Completer.completions(text, len(text)))
    assert all(text[c.start : c.end] == text.rpartition(" ")[2] for c in found)
    return [c.text for c in found]


def test_the_shell_offers_commands_and_options(shell: InteractiveShell) -> None:
    assert offered(shell, "%gpupool sta") == ["status", "start"]
    assert offered(shell, "%gpupool start --ti") == ["--timeout"]
    assert offered(shell, "%gpupool start s")[:2] == ["ssh", "slurm"]
    assert offered(shell, "%%spmd --view ") == ["auto", "quiet"]


def test_unloading_takes_the_completion_away(shell: InteractiveShell) -> None:
    gpupool.load_ipython_extension(shell)  # loading twice must not leave one behind
    gpupool.unload_ipython_extension(shell)
    assert shell.Completer.custom_matchers == []
    assert "status" not in offered(shell, "%gpupool sta")
