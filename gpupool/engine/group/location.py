"""Where this rank is at the moment, asked while its main thread is blocked. Runs on engines.

The collective is read from torch's flight recorder, which numbers those of NCCL and of gloo. It
does not know send, recv and monitored_barrier of gloo: these are seen in the main thread's stack,
and so is the line of the notebook. A backward pass of DDP waits in `loss.backward()`.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.rpc import api as rpc

from gpupool.core.wire.calls import invoke
from gpupool.core.wire.location import POINT_TO_POINT, Collective, Location
from gpupool.engine import calls
from gpupool.engine.shell import innermost

_c10d: Any = _distributed_c10d  # its flight recorder is not in every version's types
_DISTRIBUTED = distributed_c10d.__file__
_OURS = str(Path(__file__).parents[1] / "cells" / "torchrun.py")  # stands in for torch's
_OTHERS = {
    (_OURS, "_init_process_group"): "init_process_group",
    (rpc.__file__, "shutdown"): "rpc.shutdown",
}
_STUB = invoke.__code__.co_filename  # under every call

_formed_ns = 0  # what was called before that is of a group that is gone
_counts = ""  # of collectives begun and over, when they were looked at last; and of which group


def forget_before() -> None:
    global _formed_ns
    _formed_ns = time.time_ns()


def locate(glance: bool = False) -> Location:
    """Where the main thread is; from any thread. Costs 0.3 ms, or 30 ms to read a full record.

    Args:
        glance: name collectives only if none has begun or ended since the last call. So a
            training that is looked at every second loses nothing.
    """
    global _counts
    main = sys._current_frames()[threading.main_thread().ident or 0]
    frames = [frame for frame, _ in traceback.walk_stack(main)]  # the innermost first
    # what is further out has called us
    own = [*takewhile(lambda frame: frame.f_code.co_filename != _STUB, frames)]
    function, frame = _function(frames)
    statuses = [list(dump.get("pg_status", {}).values()) for _, dump in _dumps(False)]  # 0.1 ms
    before, _counts = _counts, json.dumps([_formed_ns, *statuses])
    entries = [] if glance and _counts != before else _recorded(_counts)
    pending = [entry for entry in entries if not entry["retired"]]
    if pending or _counts != before:  # torch counts a collective a moment before it records it
        _recorded.cache_clear()
    collective = _collective(pending[0]) if pending else _from_stack(function, frame)
    return Location(
        line=innermost([(frame.f_code.co_filename, frame.f_lineno) for frame in own[::-1]]),
        collective=collective,
        function=function,
        cpu_s=time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0)),
        queued=bool(pending and pending[0]["queued"]),
        idle=calls.current() is None or own == frames,
        last=tuple(_collective(entry) for entry in entries if entry["retired"]),
    )


# ---- the stack -------------------------------------------------------------------------------


def _function(frames: list[FrameType]) -> tuple[str, FrameType | None]:
    """The outermost public one of torch.distributed."""
    for frame in reversed(frames):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == _DISTRIBUTED and not name.startswith("_"):
            return name, frame
        if (file, name) in _OTHERS:
            return _OTHERS[file, name], frame
    return "", None


def _from_stack(function: str, frame: FrameType | None) -> Collective | None:
    """What the recorder does not know: its op and ranks, without a number."""
    if frame is None or not dist.is_initialized():
        return None
    if function == "rpc.shutdown":  # it waits for all workers; who are all ranks, mostly
        num_ranks = dist.get_world_size()
        is_of_all = len(rpc._ALL_WORKER_NAMES or ()) == num_ranks
        return Collective(function, 0, [*range(num_ranks)]) if is_of_all else None
    if function not in (*POINT_TO_POINT, "monitored_barrier"):
        return None
    given = frame.f_locals
    group = given.get("group")
    ranks, name = dist.get_process_group_ranks(group), getattr(group, "group_name", "")
    if function in POINT_TO_POINT:
        other = "dst" if "send" in function else "src"
        peer, number = given.get(other), given.get(f"group_{other}")
        if peer is None and number is not None:
            peer = ranks[number]
        if peer is not None:  # else it receives from any
            ranks = sorted({dist.get_rank(), peer})
    return Collective(function, 0, ranks, group=name)


# ---- torch's flight recorder -----------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _recorded(counts: str) -> list[dict[str, Any]]:
    """Of the present groups the recorded collectives that are pending, and the last one over."""
    recorded = [
        {**entry, "queued": queued}
        for queued, dump in _dumps(True)
        for entry in dump.get("entries", ())
        if entry["time_created_ns"] >= _formed_ns
    ]
    over = [entry for entry in recorded if entry["retired"] and not entry["is_p2p"]]
    last = {entry["process_group"][0]: entry for entry in over}  # the record is in order
    return [*last.values(), *(entry for entry in recorded if not entry["retired"])]


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
    named = [group for group, known in [*distributed_c10d._world.pg_names.items()] if known == name]
    ranks = dist.get_process_group_ranks(named[0]) if named else []
    seq = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    op = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    since_s = max(0.0, (time.time_ns() - entry["time_created_ns"]) / 1e9)
    return Collective(op.partition(" ")[0], seq, ranks, since_s, _values(entry), name)


def _values(entry: dict[str, Any]) -> str:
    """ "float32[4]", or "float32[4], ... (7 tensors)"."""
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if not sizes or not dtypes:
        return ""
    dtype = str(getattr(torch, dtypes[0].lower(), dtypes[0])).removeprefix("torch.")
    first = f"{dtype}[{', '.join(map(str, sizes[0]))}]"
    return f"{first}, ... ({len(sizes)} tensors)" if len(sizes) > 1 else first
