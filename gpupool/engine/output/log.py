"""Mask secrets in this engine's log, which is a file. Runs on engines.

ipykernel shows in the notebook what programs and C code write to descriptors 1 and 2, and echoes it
into the log too: a `!env` in a cell would leave every key there.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading

from gpupool.core.wire.masking import Redactor, Secrets

secrets = Secrets()  # the values to mask from now on


def mask() -> None:
    """Put a thread that masks between the echo and the log. Once, before there are secrets."""
    for stream in (sys.stdout, sys.stderr):
        echo = getattr(stream, "_original_stdstream_copy", None)
        if echo is None:  # ipykernel has left the descriptors alone
            continue
        log = os.dup(echo)
        reader, writer = os.pipe()
        os.dup2(writer, echo, inheritable=False)
        os.close(writer)
        threading.Thread(target=_pump, args=(reader, log), name="gpupool-log", daemon=True).start()


def _pump(reader: int, log: int) -> None:
    redactor = Redactor(secrets)
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    while octets := os.read(reader, 1 << 16):
        os.write(log, redactor.feed(decode(octets)).encode(errors="surrogateescape"))
