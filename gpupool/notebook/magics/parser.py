"""An argument parser for a magic's line, whose errors are one sentence. Runs on the client."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NoReturn

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import suggest
from gpupool.core.terminal import plain

# argparse repeats the value of an option that takes none.
_REPEATED = re.compile("ignored explicit argument .*", re.DOTALL)


def _formatter(prog: str) -> argparse.RawDescriptionHelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=96)


class MagicParser(argparse.ArgumentParser):
    """An argument parser whose errors are `OptionsError`s that say what is allowed.

    They repeat no value: it may be a secret, and a notebook keeps its errors. So do the types of
    arguments.
    """

    def __init__(self, prog: str, **how: Any) -> None:
        how = {"allow_abbrev": False, "add_help": False, "formatter_class": _formatter, **how}
        super().__init__(prog, **how)
        self.color = False  # which Python has from 3.14 on
        # argparse takes -1 for a value and -1,0 for an option; in ranks both are values
        self._negative_number_matcher = re.compile(r"-\d")

    def split(self, line: str) -> list[str]:
        """The words of a line, as a shell splits it.

        Raises:
            OptionsError: a quotation has no end.
        """
        try:
            return shlex.split(line)
        except ValueError as error:
            raise OptionsError(f"{self.prog}: {error}.") from None

    def parse_line(self, line: str) -> argparse.Namespace:
        """The arguments on a magic's line.

        Raises:
            OptionsError: what is wrong, what is nearest to it, and how it is written.
        """
        return self.parse_args(self.split(line))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, but no word may be left; each command answers for its own."""
        parsed, unknown = super().parse_known_args(args, namespace)
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        known = self.option_names()
        if options and known:
            sentence = f"{self.prog} has no option {options[0]}. {suggest(options[0], known)}"
            raise OptionsError(plain(sentence))
        if unknown:
            self.error(f"{unknown[0].partition('=')[0]!r} is too much")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Raise an error with this message, and how the line is written."""
        sentence = _REPEATED.sub("it takes no value", message)
        end = "" if sentence.endswith(("?", ".")) else "."
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise OptionsError(plain(f"{self.prog}: {sentence}{end} Usage: {usage}")) from None

    def option_names(self) -> list[str]:
        """All options in all spellings."""
        return [name for action in self._actions for name in action.option_strings]
