"""`python -m gpupool`: what gpupool does outside of notebooks."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from gpupool.check import command
from gpupool.core.errors import GpuPoolError


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        "python -m gpupool", description="A parallel pool for Jupyter."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="does gpupool keep its promises on this machine?",
        description=command.ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_options(check)
    try:
        sys.exit(command.run(parser.parse_args()))
    except (GpuPoolError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
