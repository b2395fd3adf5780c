"""The pool's controller: ipyparallel's, set up for a machine with other users. Runs on the host.

The starter forks it like an engine. Its command line names ports and folders; the settings stand
here, as any user of the machine may read a command line.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import threading
import traceback
import types
from typing import Any

_QUICK_MS = 20
_QUICK_FOR_S = 10.0
_UNREAD = {b"iopub", b"incontrol", b"outcontrol"}


def main() -> None:
    try:
        _serve()
    except Exception:
        traceback.print_exc()
    finally:  # at once: triton would list what it leaks, and hide why in the log
        os._exit(1)


def _serve() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 140 and some for each rank
    import zmq
    from ipyparallel.controller import app, heartmonitor, hub
    from traitlets.config import Config

    class HeartMonitor(heartmonitor.HeartMonitor):  # type: ignore[misc]
        """Hears of a new engine with its first beat, not the one after, and beats quickly first."""

        def start(self) -> None:
            super().start()
            self.caller.callback_time = _QUICK_MS

        def beat(self) -> None:
            super().beat()
            if self.lifetime > _QUICK_FOR_S:
                self.caller.callback_time = self.period

        def handle_pong(self, message: Any) -> None:
            super().handle_pong(message)
            if new := self.responses - self.hearts:
                self.handle_new_hearts(new)

    class Controller(app.IPController):  # type: ignore[misc]
        """One process: that of its heartbeat alone could end, and no engine could come then."""

        heartmonitor_process: Any

        def init_hub(self) -> None:
            super().init_hub()
            # It would write who is there for a controller that comes after it, and forget a rank
            # only when that has been written.
            self.hub.engine_state_file = ""
            # Nor need it read what ranks print, nor values on their way to another host: that is
            # for a database, which it has not.
            self.hub.monitor.setsockopt(zmq.UNSUBSCRIBE, b"")
            for topic in self.hub.monitor_handlers.keys() - _UNREAD:
                self.hub.monitor.setsockopt(zmq.SUBSCRIBE, topic)
            process = self.heartmonitor_process
            target, options = process._target, process._kwargs
            self.heartmonitor_process = threading.Thread(target=target, kwargs=options, daemon=True)

        def init_signal(self) -> None:
            """Signals are not handled: the exit status names them."""

    logging.disable(logging.ERROR)  # else it logs each new rank, late beat and event of a training
    config = Config()
    config.IPController.log_level = logging.CRITICAL
    # Every user of the machine may connect to its ports. CURVE encrypts what crosses them and keeps
    # out whoever lacks the keys; signatures keep off, besides, what is damaged or sent again. The
    # keys stand in the connection files alone, which only this user can read.
    config.IPController.enable_curve = True
    config.Session.key = secrets.token_hex(32).encode()
    config.IPController.db_class = "ipyparallel.controller.dictdb.NoDB"
    # Threads instead of a process for each of its queues: 8 processes and 320 MiB less.
    config.IPController.use_threads = True
    # It hears of a new engine at its next heartbeat, so beats are quick; any number may be missed:
    # the starter knows who is dead, and a rank that a debugger has stopped for a while is not.
    config.HeartMonitor.period = 200
    config.HeartMonitor.max_heartmonitor_misses = 1_000_000_000
    heartmonitor.HeartMonitor = HeartMonitor
    # For a database, which it has not: 0.5 ms of each call, and a quarter of a second of the start.
    hub.extract_dates = lambda value: value
    app.time = types.SimpleNamespace(sleep=lambda s: None)
    Controller.launch_instance(config=config)
