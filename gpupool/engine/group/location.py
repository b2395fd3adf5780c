"""Where this rank is at the moment, asked while its main thread is blocked. Runs on engines.

The collective is read from torch's flight recorder, which numbers those of NCCL and of gloo. It
does not know send, recv and monitored_barrier of gloo: these are seen in the main thread's stack,
and so is the line of the notebook. A backward pass of DDP waits in `loss.backward()`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.rpc import api as rpc

from gpupool.core.wire.invoke import invoke
from gpupool.core.wire.location import POINT_TO_POINT, Collective, Location
from gpupool.engine import calls
from gpupool.engine.shell.cell_names import cell_of, is_users, place

_c10d: Any = _distributed_c10d  # its flight recorder is not in every version's types
_DISTRIBUTED = distributed_c10d.__file__
_RPC = rpc.__file__
_OURS = str(Path(__file__).parents[1] / "cells" / "torchrun.py")  # stands in for torch's
_STUB = invoke.__code__.co_filename  # under every call
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool",
}  # fmt: skip

_formed_ns = 0  # what was called before that is of a group that is gone
_counts = ""  # of collectives begun and over, when they were looked at last; and of which group
_known: tuple[str, list[dict[str, Any]]] = ("", [])  # the counts of then, and what was recorded


def forget_before() -> None:
    """Collectives that were called until now are over: the group has been formed again."""
    global _formed_ns
    _formed_ns = time.time_ns()


def locate(glance: bool = False) -> Location:
    """Where the main thread is; from any thread.

    Costs 0.3 ms, and up to 30 ms where collectives have been called since the last time.

    Args:
        glance: name collectives only if none has begun or ended since the last call. So a
            training that is looked at every second loses nothing.
    """
    global _counts
    frames = _main_frames()  # the innermost first
    function, frame = _function(frames)
    before, _counts = _counts, json.dumps([_formed_ns, *_statuses()])
    has_changed = _counts != before
    entries = [] if glance and has_changed else _entries(has_changed)
    pending = [entry for entry in entries if not entry["retired"]]
    collective = _collective(pending[0]) if pending else _from_stack(function, frame)
    return Location(
        line=_line(frames),
        collective=collective,
        function=function,
        cpu_s=_cpu_s(),
        imports=calls.imports(),
        queued=bool(pending and pending[0]["queued"]),
        idle=calls.is_over() or not any(frame.f_code.co_filename == _STUB for frame in frames),
        last=tuple(_collective(entry) for entry in entries if entry["retired"]),
    )


# ---- the stack -------------------------------------------------------------------------------


def _main_frames() -> list[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _line(frames: list[FrameType]) -> str:
    """The innermost line in a cell, else in a file of the user's, else ""."""
    found = ""
    for frame in frames:
        name = frame.f_code.co_filename
        if name == _STUB:  # what is further out has called us
            break
        cell = cell_of(name)
        if cell:
            return f"{cell}, line {frame.f_lineno}"
        if not found and is_users(name):
            found = f"{place(name)}, line {frame.f_lineno}"
    return found


def _function(frames: list[FrameType]) -> tuple[str, FrameType | None]:
    """The outermost public function of torch.distributed that the main thread is in."""
    for frame in reversed(frames):
        code = frame.f_code
        if code.co_filename == _DISTRIBUTED and not code.co_name.startswith("_"):
            return code.co_name, frame
        if code.co_filename == _OURS and code.co_name == "_init_process_group":
            return "init_process_group", frame
        if code.co_filename == _RPC and code.co_name == "shutdown":
            return "rpc.shutdown", frame
    return "", None


def _from_stack(function: str, frame: FrameType | None) -> Collective | None:
    """What the recorder does not know: its op and ranks, without a number."""
    if frame is None or not dist.is_initialized():
        return None
    if function == "rpc.shutdown":  # it waits for all workers; who are all ranks, mostly
        is_of_all = len(rpc._ALL_WORKER_NAMES or ()) == dist.get_world_size()
        return Collective(function, 0, _ranks_of(dist.group.WORLD)) if is_of_all else None
    if function not in (*POINT_TO_POINT, "monitored_barrier"):
        return None
    given = frame.f_locals
    group = given.get("group")
    ranks = _ranks_of(dist.group.WORLD if group is None else group)
    name = getattr(group, "group_name", "")
    if function in POINT_TO_POINT:
        peer = given.get("dst" if "send" in function else "src")
        if peer is None:
            peer = given.get("group_dst" if "send" in function else "group_src")
            peer = ranks[peer] if isinstance(peer, int) and peer < len(ranks) else None
        if isinstance(peer, int):  # else it receives from any
            ranks = tuple(sorted({dist.get_rank(), peer}))
    return Collective(function, 0, ranks, group=name)


def _cpu_s() -> float:
    main = threading.main_thread().ident
    return time.clock_gettime(time.pthread_getcpuclockid(main)) if main else 0.0


# ---- torch's flight recorder -----------------------------------------------------------------


def _statuses() -> list[Any]:
    """Of each group how many collectives have begun and are over: 0.1 ms."""
    return [status for _, dump in _dumps(False) for status in dump.get("pg_status", {}).values()]


def _entries(has_changed: bool) -> list[dict[str, Any]]:
    """Of the present groups the recorded collectives that are pending, and the last one over.

    A full record of 2000 takes 30 ms to read. It is read again when it has changed, and as long as
    something is pending: then the rank waits anyway. torch counts a collective a moment before it
    records it, so what has just begun is looked at once more.
    """
    global _known
    counts, entries = _known
    if counts != _counts:
        recorded = [
            {**entry, "queued": queued}
            for queued, dump in _dumps(True)
            for entry in dump.get("entries", ())
        ]
        over = [e for e in recorded if e["retired"] and not e["is_p2p"]]
        pending = [e for e in recorded if not e["retired"] and e["time_created_ns"] >= _formed_ns]
        last = {e["process_group"][0]: e for e in over}  # its newest, as the record is in order
        entries = [*last.values(), *pending]
        _known = ("" if pending or has_changed else _counts), entries
    return [entry for entry in entries if entry["time_created_ns"] >= _formed_ns]


def _dumps(with_entries: bool) -> Iterator[tuple[bool, dict[str, Any]]]:
    """What each backend of this torch has recorded, and whether its collectives are queued."""
    for backend in ((), ("nccl2",)) if _TAKES_BACKEND else ((),):
        yield bool(backend), json.loads(_c10d._dump_fr_trace_json(with_entries, False, *backend))
    dump_nccl = getattr(_c10d, "_dump_nccl_trace_json", None)
    if dump_nccl is not None:
        yield True, json.loads(dump_nccl(with_entries, False))


_TAKES_BACKEND = "backend" in (_c10d._dump_fr_trace_json.__doc__ or "")


def _collective(entry: dict[str, Any]) -> Collective:
    name = entry["process_group"][0]
    seq = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    op = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    since_s = max(0.0, (time.time_ns() - entry["time_created_ns"]) / 1e9)
    return Collective(op.partition(" ")[0], seq, _ranks_named(name), since_s, _values(entry), name)


def _values(entry: dict[str, Any]) -> str:
    """ "float32[4]", or "float32[4], ... (7 tensors)"."""
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if not sizes or not dtypes:
        return ""
    shape = ", ".join(map(str, sizes[0]))
    first = f"{_DTYPES.get(dtypes[0], dtypes[0])}[{shape}]"
    return f"{first}, ... ({len(sizes)} tensors)" if len(sizes) > 1 else first


def _ranks_named(name: str) -> tuple[int, ...]:
    """The global ranks of the group that torch has given this name."""
    for group, known in list(distributed_c10d._world.pg_names.items()):
        if known == name:
            return _ranks_of(group)
    return ()


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(sorted(distributed_c10d._world.pg_group_ranks.get(group, ())))
