"""What the Tab key offers after our magics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import gpupool
from gpupool.notebook.magics.completion import Words, complete

WORDS: Words = {
    "profile": lambda: ["local"],
    "env": lambda: ["AWS_A", "AWS_B", "HOME"],
    "names": lambda: ["AWS_A", "AWS_B", "HOME"],
    "variables": lambda: ["model", "scheduler"],
    "rank": lambda: ["0", "1"],
    "ranks": lambda: ["all", "0", "1"],
    "gpus": lambda: ["0", "1:0"],
    "idle_timeout": lambda: ["30m", "never"],
    "hang_after_s": lambda: ["30s", "never"],
}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%gpupool st", ["status", "start", "stop"]),
        ("%gpupool start --t", ["--timeout"]),
        ("%gpupool start --f", ["--force"]),
        ("%gpupool start --backend ", ["auto", "nccl", "gloo"]),
        ("%gpupool start --on-hang ", ["tell", "abort"]),
        ("%gpupool start --h", ["--hang-after"]),
        ("%gpupool start --hang-after ", ["30s", "never"]),
        ("%gpupool start --idle-timeout n", ["never"]),
        ("%gpupool start --gpus ", ["0", "1:0"]),
        ("%gpupool start --env HOME --b", ["--backend"]),
        ("%gpupool start --env --b", []),  # a name has to come first
        ("%gpupool start lo", ["local"]),
        ("%gpupool start -n ", []),
        ("%gpupool start --cpu --c", []),  # an option is offered once
        ("%gpupool env AWS", ["AWS_A", "AWS_B"]),
        ("%gpupool env AWS_A AWS", ["AWS_B"]),
        ("%gpupool start --env HO", ["HOME"]),
        ("%gpupool stop ", []),
        ("%gpupool sync ", ["0", "1", "-t", "--targets", "--force"]),
        ("%gpupool sync 0 model -t ", ["all", "0", "1"]),
        ("%gpupool restart a", ["all"]),
        ("%gpupool log ", ["0", "1", "-n"]),
        ("%gpupool log 1 ", ["-n"]),
        ("%gpupool debug ", ["0", "1"]),
        ("%gpupool he", ["help"]),
        ("%gpupool help sta", ["status", "start"]),
        ("%gpupool help sp", ["spmd"]),
        ("%%spmd -t ", ["all", "0", "1"]),
        ("%%spmd --targets 0 --n", ["--nowait", "--no-sync"]),
        ("%gpupool sync 0 m", ["model"]),
        ("%gpupool sync 0 model s", ["scheduler"]),
        ("%gpupool nonsense ", []),
        ("%%spmd --v", ["--view"]),
        ("%%spmd --view q", ["quiet"]),
        ("%%spmd -o ", []),
        ("%gpupool", []),
        ("print(1) ", []),
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
    assert offered(shell, "%%spmd --view ") == ["auto", "quiet"]


def test_other_lines_are_completed_as_before(shell: InteractiveShell) -> None:
    assert "isinstance" in offered(shell, "x = isinst")


def test_unloading_takes_the_completion_away(shell: InteractiveShell) -> None:
    gpupool.load_ipython_extension(shell)  # loading twice must not leave one behind
    gpupool.unload_ipython_extension(shell)
    assert shell.Completer.custom_matchers == []
    assert "status" not in offered(shell, "%gpupool sta")
