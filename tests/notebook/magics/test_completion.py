"""What the Tab key offers after our magics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import gpupool
from gpupool.notebook.magics.code_completion import option_values
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
    "only": lambda: ["kill", "abort-item"],
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
        ("%gpupool sync ", ["0", "1", "-t", "--targets"]),
        ("%gpupool sync 0 model -t ", ["all", "0", "1"]),
        ("%gpupool restart a", ["all"]),
        ("%gpupool log ", ["0", "1", "-n"]),
        ("%gpupool log 1 ", ["-n"]),
        ("%gpupool debug ", ["0", "1"]),
        ("%gpupool gpus --watch ", []),
        ("%gpupool auto o", ["on", "off"]),
        ("%gpupool auto on --view q", ["quiet"]),
        ("%gpupool he", ["help"]),
        ("%gpupool help sta", ["status", "start"]),
        ("%gpupool help sp", ["spmd"]),
        ("%gpupool ch", ["check"]),
        ("%gpupool check --on", ["--only"]),
        ("%gpupool check --only k", ["kill"]),
        ("%gpupool check --only kill abort-i", ["abort-item"]),
        ("%gpupool check --cpu --j", ["--json"]),
        ("%%spmd -t ", ["all", "0", "1"]),
        ("%%spmd --targets 0 --n", ["--nowait", "--no-sync"]),
        ("%gpupool sync 0 m", ["model"]),
        ("%gpupool sync 0 model s", ["scheduler"]),
        ("%gpupool nonsense ", []),
        ("%%spmd --v", ["--view"]),
        ("%%spmd --view r", ["ranks", "raw"]),
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
    assert offered(shell, "%%spmd --view ra") == ["ranks", "raw"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpupool.TrainingOptions(optimizer='ad", ["adam", "adamw"]),
        ('gpupool.TrainingOptions(lr=f(1, ")"), keep="', ["auto", "best", "last"]),
        ("gpupool.train(net, data, shuffle='o", ["once"]),
        ("train(net,\n    data,  # (with\n    precision=", ['"float32"', '"bf16"', '"fp16"']),
        ("gpupool.predict(net, data, precision='f", ["float32", "fp16"]),
        ("gpupool.start(backend='g", ["gloo"]),
        ("options = TrainingOptions(schedule='cos", ["cosine"]),
        ("gpupool.TrainingOptions(lr='", []),
        ("gpupool.TrainingOptions([dict(optimizer='", []),
        ("dict(optimizer='ad", []),
        ("net.fit(optimizer='ad", []),
        ("optimizer = 'ad", []),
    ],
)
def test_the_words_of_an_option_are_offered_in_a_call(text: str, words: list[str]) -> None:
    names = {"gpupool": gpupool, "net": object()}
    assert option_values(text, names)[0] == words


def test_the_shell_offers_names_and_words_of_options(shell: InteractiveShell) -> None:
    shell.user_ns.update(gpupool=gpupool, train=gpupool.train)
    for call in ("gpupool.TrainingOptions(sch", "gpupool.train(net, sch"):
        with provisionalcompleter():
            assert "schedule=" in [c.text for c in shell.Completer.completions(call, len(call))]
    text = 'train(net,\n      data, schedule="'
    with provisionalcompleter():
        found = [(c.text, c.start) for c in shell.Completer.completions(text, len(text))]
    assert ("cosine", len(text)) in found
    assert len(found) == 7  # no files and no variables


def test_cells_of_ranks_know_what_each_rank_has(shell: InteractiveShell) -> None:
    for typed, wanted in (("ran", "rank"), ("world_", "world_size"), ("dis", "dist")):
        for code in (f"%%spmd\n{typed}", f"%%spmd -t 0\nx = 1\nprint({typed}"):
            with provisionalcompleter():
                found = [c.text for c in shell.Completer.completions(code, len(code))]
            assert found.count(wanted) == 1
    with provisionalcompleter():
        assert "rank" not in [c.text for c in shell.Completer.completions("ran", 3)]


def test_other_lines_are_completed_as_before(shell: InteractiveShell) -> None:
    assert "isinstance" in offered(shell, "x = isinst")


def test_unloading_takes_the_completion_away(shell: InteractiveShell) -> None:
    gpupool.load_ipython_extension(shell)  # loading twice must not leave one behind
    gpupool.unload_ipython_extension(shell)
    assert shell.Completer.custom_matchers == []
    assert "status" not in offered(shell, "%gpupool sta")
