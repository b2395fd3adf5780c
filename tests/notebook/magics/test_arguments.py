"""What may stand on a magic's line, and the sentence for what may not."""

from __future__ import annotations

import pytest

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser, start_options

PARSERS = {**COMMANDS, "%%spmd": spmd_parser}


@pytest.mark.parametrize(
    ("command", "line", "sentence"),
    [
        (
            "start",
            "--tiemout 3",
            "%gpupool start has no option --tiemout. Did you mean '--timeout'?",
        ),
        (
            "start",
            "--backend ncl",
            "%gpupool start: argument --backend: 'ncl' is unknown. Did you mean 'nccl'? "
            "Usage: %gpupool start [--backend {auto,nccl,gloo}]",
        ),
        ("start", "--timeout nan", "argument --timeout: nan is not a number of seconds above 0."),
        (
            "start",
            "local remote",
            "%gpupool start: 'remote' is too much. Usage: %gpupool start [PROFILE] [options]",
        ),
        ("env", "'AWS_*", "%gpupool env: No closing quotation."),
        ("%%spmd", "--local", "%%spmd has no option --local. There are: -t, --targets, -o,"),
        ("%%spmd", "-o a.b", "argument -o/--out: 'a.b' is not a name that a variable can have."),
        ("%%spmd", "rank", "%%spmd: 'rank' is too much. Usage: %%spmd [-t RANKS] [-o NAME]"),
    ],
)
def test_a_bad_line_is_answered_with_what_is_allowed(
    command: str, line: str, sentence: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        PARSERS[command]().parse_line(line)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("slurm -n 16 -- -p gpu -n 3", {"profile": "slurm", "n": 16, "words": "-p gpu -n 3"}),
        ("ssh --hosts gpu1,gpu2:4", {"profile": "ssh", "hosts": "gpu1,gpu2:4", "words": ""}),
    ],
)
def test_words_behind_dashes_are_those_of_a_scheduler(
    line: str, options: dict[str, object]
) -> None:
    found = start_options(line)
    assert {**found, "words": found["words"].strip()} == options
