"""Pieces of cells: ranks that wait for something, so that nothing depends on who is how fast."""

from __future__ import annotations

from pathlib import Path

_PEERS = '''
import json, os, sys, threading, time
from torch._C import _distributed_c10d as _c10d

def until_told():
    """Until the other rank waits."""
    while not os.path.exists({path!r}):
        time.sleep(0.01)

def tell_when_waiting():
    """Tell once the main thread is in a collective, or forms a group."""
    began_ns, main = time.time_ns(), threading.main_thread().ident
    def pending(entry):
        return not entry["retired"] and entry["time_created_ns"] > began_ns
    def forms_group():
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != "_init_process_group":
            frame = frame.f_back
        return frame is not None
    def look():
        while not forms_group():
            record = json.loads(_c10d._dump_fr_trace_json(True, False))
            if any(map(pending, record.get("entries", ()))):
                break
            time.sleep(0.02)
        open({path!r}, "w").close()
    threading.Thread(target=look, daemon=True).start()

if rank == {waits}: tell_when_waiting()
'''


def peers(path: Path, waits: int = 0) -> str:
    """A cell before one in which the rank `waits` is to wait in a collective for another one.

    In that cell the other one calls `until_told()`, and then does not come. `path` is a new file.
    """
    return _PEERS.format(path=str(path), waits=waits)


def until_there(path: Path, margin: str = "") -> str:
    lines = ("import os, time", f"while not os.path.exists({str(path)!r}): time.sleep(0.02)")
    return "\n".join(margin + line for line in lines)


def touch(path: Path) -> str:
    return f"open({str(path)!r}, 'w').close()"
