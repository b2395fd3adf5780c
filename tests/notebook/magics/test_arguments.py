"""What may stand on a magic's line, and the sentence for what may not."""

from __future__ import annotations

import pytest

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser

PARSERS = {**COMMANDS, "%%spmd": spmd_parser}


@pytest.mark.parametrize(
    ("command", "line", "sentence"),
    [
        (
            "start",
            "--tiemout 3",
            "%gpupool start has no option --tiemout. Did you mean '--timeout'?",
        ),
        ("start", "--gpu=0", "%gpupool start has no option --gpu. Did you mean '--gpus'?"),
        ("start", "-n", "%gpupool start: argument -n: expected one argument. Usage: %gpupool"),
        (
            "start",
            "-n two",
            "%gpupool start: argument -n: invalid whole number value: 'two'. "
            "Usage: %gpupool start [-n N]",
        ),
        (
            "start",
            "--backend ncl",
            "%gpupool start: argument --backend: 'ncl' is unknown. Did you mean 'nccl'? "
            "Usage: %gpupool start [--backend {auto,nccl,gloo}]",
        ),
        ("start", "--on-hang x", "'x' is unknown. There are: tell, abort. Usage: %gpupool start"),
        ("start", "--timeout 0", "argument --timeout: 0 is not a number of seconds above 0."),
        ("start", "--timeout nan", "argument --timeout: nan is not a number of seconds above 0."),
        ("start", "--timeout x", "argument --timeout: invalid number of seconds value: 'x'."),
        ("start", "--env", "%gpupool start: argument --env: expected at least one argument."),
        (
            "start",
            "local remote",
            "%gpupool start: 'remote' is too much. Usage: %gpupool start [PROFILE] [options]",
        ),
        ("stop", "now", "%gpupool stop: 'now' is too much. Usage: %gpupool stop"),
        ("stop", "--now", "%gpupool stop: '--now' is too much. Usage: %gpupool stop"),
        ("env", "'AWS_*", "%gpupool env: No closing quotation."),
        ("log", "0 -n 0", "%gpupool log: argument -n: 0 is not a number above 0."),
        (
            "%%spmd",
            "--view quite",
            "%%spmd: argument --view: 'quite' is unknown. Did you mean 'quiet'? "
            "Usage: %%spmd [--view {auto,quiet}]",
        ),
        ("%%spmd", "--local", "%%spmd has no option --local. There are: -t, --targets, -o,"),
        ("%%spmd", "-t", "%%spmd: argument -t/--targets: expected one argument."),
        (
            "%%spmd",
            "-o class",
            "argument -o/--out: 'class' is not a name that a variable can have.",
        ),
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
