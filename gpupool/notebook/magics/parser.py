"""An argument parser for a magic's line, whose errors are one sentence. Runs on the client."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import suggest
from gpupool.core.terminal import plain

_LONG_USAGE = 120  # characters, from where on a usage line leaves the options out


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=26, width=96)


class MagicParser(argparse.ArgumentParser):
    """An argument parser whose errors are `OptionsError`s that say what is allowed."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            add_help=False,
            formatter_class=_formatter,
            exit_on_error=False,
            # an unset option is left out, so that the option class's default counts
            argument_default=argparse.SUPPRESS,
        )
        # argparse takes -1 for a value and -1,0 for an option; in ranks both are values
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        raise OptionsError(f"{self.prog}: {_sentence(message)} Usage: {self._usage()}")

    def parse_line(self, line: str) -> argparse.Namespace:
        """The arguments on a magic's line, split as a shell does.

        Raises:
            OptionsError: what is wrong, what is nearest to it, and how it is written.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise OptionsError(f"{self.prog}: {error}.") from None
        try:
            # Not `parse_args`, whose error for a word too much repeats it: it may be a secret.
            parsed, unknown = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            sentence = f"{self.prog}: {_sentence(str(error))} Usage: {self._usage_of(error)}"
            raise OptionsError(plain(_without_values(sentence, words))) from None
        except OptionsError as error:
            raise OptionsError(plain(_without_values(str(error), words))) from None
        if unknown:
            raise self._unknown(unknown)
        return parsed

    def _unknown(self, words: list[str]) -> OptionsError:
        """The error for words that nothing takes."""
        options = [word.split("=")[0] for word in words if word.startswith("-")]
        known = self.option_names()
        if options and known:
            sentence = f"{self.prog} has no option {options[0]}. {suggest(options[0], known)}"
            return OptionsError(plain(sentence))
        message = f"{self.prog}: {words[0]!r} is too much. Usage: {self._usage()}"
        return OptionsError(plain(_without_values(message, words)))

    def manual(self) -> str:
        """What `-h` shows: how a line is written, what it does, and each argument."""
        text = self.format_help().removeprefix("usage: ").rstrip()
        # Lines that continue stand below the first one, where "usage: " is gone.
        usage, gap, rest = text.partition("\n\n")
        return usage.replace("\n       ", "\n") + gap + rest.replace("positional ", "")

    def option_names(self) -> list[str]:
        """All options in all spellings that a user may write."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings]

    def expected_after(self, words: Sequence[str]) -> tuple[list[argparse.Action], bool]:
        """The arguments that could come next after `words`, and whether an option may follow."""
        options = {name: action for action in self._actions for name in action.option_strings}
        plain = [action for action in self._actions if not action.option_strings]
        open_: argparse.Action | None = None  # takes more values
        for word in words:
            if word in options:
                open_ = options[word] if options[word].nargs != 0 else None
            elif open_ is not None:
                open_ = open_ if open_.nargs == "+" else None
            elif plain and plain[0].nargs != "*":
                plain.pop(0)
        if open_ is None:
            return plain[:1], True
        return [open_], open_.nargs is not None and words[-1] not in options

    def _usage(self) -> str:
        """How a line is written: with all options, or where that is long without."""
        usage = _flat(self.format_usage())
        if len(usage) <= _LONG_USAGE:
            return usage
        plain = [action for action in self._actions if not action.option_strings]
        return f"{self.prog} {_flat(_usage_of_some('', plain))} [options]".replace("  ", " ")

    def _usage_of(self, error: argparse.ArgumentError) -> str:
        """How the option is written that an error is about."""
        for action in self._actions:
            if error.argument_name in (
                "/".join(action.option_strings),
                action.metavar,
                action.dest,
            ):
                return f"{self.prog} {_flat(_usage_of_some('', [action]))}"
        return self._usage()


def _flat(usage: str) -> str:
    return " ".join(usage.removeprefix("usage:").split())


def _usage_of_some(prog: str, actions: Sequence[argparse.Action]) -> str:
    formatter = argparse.HelpFormatter(prog, width=1000)
    formatter.add_usage(None, actions, (), prefix="")
    return formatter.format_help()


def _sentence(message: str) -> str:
    return message if message.endswith(("?", ".")) else f"{message}."


def _without_values(message: str, words: list[str]) -> str:
    """A message without the values behind "=": they may be secrets, and errors are kept."""
    for word in words:
        _, sign, value = word.partition("=")
        if sign and value:
            # as a word, behind the letter of an option, and as the value of an option
            for shown in (word, word[2:], value):
                # argparse quotes by `repr`, so its form of the word is what has to be found.
                message = message.replace(repr(shown), repr(shown.removesuffix(value) + "..."), 1)
    return message
