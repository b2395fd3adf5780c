"""The pool's controller: ipyparallel's, set up for a machine with other users. Runs on the host.

The fork server forks it like an engine. Its command line names ports and folders; the settings
stand here, as any user of the machine may read a command line.
"""

from __future__ import annotations

import logging
import secrets


def main() -> None:
    """Serve until the agent ends it."""
    from ipyparallel.controller.app import IPController
    from traitlets.config import Config

    # What of it runs in a process of its own does not know the log level below, and would tell of
    # each beat that a dead rank misses for as long as the pool lives: 43 MB a day.
    logging.disable(logging.INFO)
    config = Config()
    config.IPController.log_level = logging.WARNING
    # Every user of the machine may connect to its ports. CURVE encrypts what crosses them and keeps
    # out whoever lacks the keys; signatures keep off, besides, what is damaged or sent again. The
    # keys stand in the connection files alone, which only this user can read.
    config.IPController.enable_curve = True
    config.Session.key = secrets.token_hex(32).encode()
    # The hub keeps no messages and hears of a new engine at its next heartbeat, so beats are quick;
    # any number may be missed: the agent knows who is dead, and a rank that was stopped for a while
    # (by a debugger) is not. Threads instead of a process for each of its queues: 7 processes and
    # 280 MiB less.
    config.IPController.db_class = "ipyparallel.controller.dictdb.NoDB"
    config.IPController.use_threads = True
    config.HeartMonitor.period = 200
    config.HeartMonitor.max_heartmonitor_misses = 1_000_000_000
    IPController.launch_instance(config=config)
