"""Keeps a library from printing what one sentence of ours says anyway. Runs anywhere."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

# They print a traceback when credentials cannot be had, and would again at every try.
_TALKATIVE = ("botocore.credentials", "botocore.tokens", "botocore.utils")


@contextlib.contextmanager
def quiet_botocore() -> Iterator[None]:
    """Keep what botocore logs about credentials in this thread meanwhile out of the output."""
    thread = threading.get_ident()

    def of_others(record: Any) -> bool:
        return bool(record.thread != thread)

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    for logger in loggers:
        logger.addFilter(of_others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(of_others)
