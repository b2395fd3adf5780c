"""ipyparallel's controller. Runs on the host, in a process that the fork server has forked."""

from __future__ import annotations

import logging


def main() -> None:
    """Serve until told to stop."""
    # Its heart monitor, a process of its own, does not follow --log-level: of each rank that was
    # ever replaced it would note five times a second that its heart beats no more.
    logging.disable(logging.INFO)
    from ipyparallel.controller.app import main

    main()
