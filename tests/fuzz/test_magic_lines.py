"""Any line behind a magic: what it means, or one error of ours in plain text."""

from __future__ import annotations

import argparse

from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.options.pool_options import PoolOptions, parse_ranks
from gpupool.notebook.magics.arguments import COMMANDS, spmd_parser
from gpupool.notebook.magics.completion import complete
from tests.fuzz.limits import fuzzed, only_our_errors

PARSERS = {**COMMANDS, "%%spmd": spmd_parser}
OPTIONS = sorted({name for make in PARSERS.values() for name in make().option_names()})
words = (
    st.sampled_from(
        [*OPTIONS, "-1", "0:", "all", "on", "--", "=", "A=b", "'", '"', "\\", "9" * 5000]
    )
    | st.text(max_size=8)
    | st.text("\x1b\x07\x9b\u202e\n\t\0-=0:,", max_size=8)
)
lines = st.lists(words, max_size=4).map(" ".join)


@fuzzed
@given(st.sampled_from(sorted(PARSERS)), lines)
def test_any_line_is_parsed_or_refused(command: str, line: str) -> None:
    with only_our_errors():
        chosen: argparse.Namespace = PARSERS[command]().parse_line(line)
        if command == "start":
            values = vars(chosen)
            PoolOptions(**{name: values[name] for name in values if name != "env"})
        if getattr(chosen, "ranks", None) is not None:
            parse_ranks(chosen.ranks, 4)
    with only_our_errors():
        complete(f"%gpupool {command} {line}", {})
        complete(f"%%spmd {line}", {})
