"""`python -m gpupool`: what gpupool does outside of notebooks."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from gpupool.check import command
from gpupool.core.errors import GpuPoolError

_CHECK = """\
Tries what gpupool promises on this machine: a line for each promise, with a figure, in two to four
minutes. "ok" is kept, "FAIL" is not, "skip" says why it cannot be tried. It is pytest over
gpupool/check (pip install 'gpupool[check]').
With a NAME: starts a pool there as %gpupool start NAME does, and has a line for each stage.

Run it where nobody else computes on these GPUs: ranks are killed, hang, and run out of memory on
purpose. Nothing is left behind. The exit status is 1 if there is a FAIL; 126: it could not be run;
130: it was interrupted.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(command.CANNOT, f"{self.prog}: {message}\n")


def main() -> NoReturn:
    """Do what the command line says, and exit."""
    parser = _Parser(prog="python -m gpupool", description="A parallel pool for Jupyter.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="does gpupool keep its promises on this machine?",
        description=_CHECK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    command.add_options(check)
    check.set_defaults(run=command.run)
    chosen = vars(parser.parse_args())
    try:
        sys.exit(chosen.pop("run")(**chosen))
    except GpuPoolError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(command.CANNOT)


if __name__ == "__main__":
    main()
