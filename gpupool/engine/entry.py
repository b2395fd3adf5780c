"""Every call that the client may make of an engine: the whole remote interface on one page.

Runs on engines. `core/wire/calls.py` says what the calls mean. What only a training needs is
imported by it: the first engines do not wait for it (`pool/launchers/starter.py`).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from gpupool.core.wire import calls as wire
from gpupool.core.wire.calls import Call, torch_settings
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.values import Bindings
from gpupool.data import device as devices
from gpupool.engine import calls, control, state_sync
from gpupool.engine.cells import debug, execute, torchrun, variables
from gpupool.engine.group import forming
from gpupool.engine.output import streams
from gpupool.engine.output.channel import leave_out_status
from gpupool.engine.process import this_rank
from gpupool.engine.shell import this_shell

_heard = torch_settings()  # what the notebook's torch was set to when a call came last


def serve(call: Call[Any]) -> Reply[Any]:
    if call.is_shown:
        # ipykernel says it to `sys.stdout`, whoever that is.
        streams.follow_call(this_shell().kernel.get_parent("shell"))
    else:
        streams.show_nothing()

    def work() -> Reply[Any]:
        if call.reloaded is not None:
            variables.load_again(call.reloaded)
        _follow_torch(call.torch_settings)
        return _do(call)

    guarded = partial(execute.guarded, work)
    return guarded() if call.number is None else calls.serve(call.number, guarded)


def _do(call: Call[Any]) -> Reply[Any]:
    match call:
        case wire.Prepare(place):
            variables.follow(place)
            _prepare()
        case wire.WarmUp():
            torch.zeros(1, device=this_rank().device)
            devices.of(this_rank().device).synchronize()
        case wire.JoinGroup():
            return Reply(forming.join())
        case wire.FormGroup(plan):
            forming.connect(plan, this_rank())
        case wire.RunSource(source, cell_number, waits):
            return _around(partial(execute.run_source, source, cell_number, waits), call.bindings)
        case wire.RunTask(packed, sources):
            run = partial(execute.run_task, partial(variables.load, packed, sources))
            return _around(run, call.bindings)
        case wire.RunFunction(packed, sources):
            run = partial(execute.run_function, partial(variables.load, packed, sources))
            return _around(run, call.bindings)
        case wire.DebugCommand(line):
            return Reply(debug.command(line))
        case wire.Receive(values):
            return Reply(variables.receive(values))
        case wire.Bind():
            return _around(lambda: Reply(None), call.bindings)
        case wire.Look(name, path, text_chars):
            return Reply(variables.look(name, path, text_chars))
        case wire.Attributes(name, path):
            return Reply(variables.attributes(name, path))
        case wire.Fetch(name, path, out_path):
            return Reply(variables.fetch(name, path, out_path))
        case wire.FetchState(names, out_path):
            return Reply(state_sync.fetch(names, out_path))
        case wire.SyncState(packed):
            return _around(partial(state_sync.take_over, packed), call.bindings)
        case _:
            # Samples are made on the CPU, whatever default device a cell has set.
            device = torch.get_default_device()
            torch.set_default_device(None)
            try:
                return _train_or_infer(call)
            finally:
                torch.set_default_device(None if device.type == "cpu" else device)
    return Reply(None)


def _train_or_infer(call: Call[Any]) -> Reply[Any]:
    from gpupool.engine import jobs

    match call:
        case wire.Train():
            return jobs.train(call)
        case wire.Predict(job, result_name):
            jobs.predict(job, result_name)
            return Reply(None)
        case wire.Evaluate(job):
            return Reply(jobs.evaluate(job))
        case wire.Confusion(job):
            return Reply(jobs.confusion(job))
    raise TypeError(f"nobody serves {type(call).__name__}")


@cache  # the pool may ask again
def _prepare() -> None:
    """Until here files were made for their owner alone: keys and logs."""
    shell = this_shell()
    shell.user_ns.update(execute.cell_names(this_rank()))
    execute.adapt(shell)
    control.install()
    # SIGTERM ends a rank that computes, too: ipyparallel hears it when its loop does. The starter's
    # stop is SIGHUP, which runs what is to run at exit.
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(calls.WAKE, lambda *_: None)
    leave_out_status(shell.kernel)
    # its handler drops what is below, but only when each record has been made
    shell.kernel.log.setLevel(logging.ERROR)
    streams.mask_log(shell.kernel.log)
    torchrun.install()


def _follow_torch(settings: Mapping[str, Any]) -> None:
    """Set what the notebook has set since the last call; what cells here have set stays else."""
    for setter, value in settings.items():
        if _heard.get(setter) != value:
            _heard[setter] = value
            getattr(torch, setter)(value)


def _around(work: Callable[[], Reply[Value]], bindings: Bindings | None) -> Reply[Value]:
    """`variables.around`; the reply says also which parcels are lost, and have to be sent again,
    and whether the pool has to form its group again."""
    if bindings is not None:
        reply = execute.guarded(lambda: variables.around(work, bindings))
        reply = replace(reply, lost=variables.lost(bindings.values.numbers.values()))
    else:
        reply = execute.guarded(work)
    device = devices.in_use()
    if reply.raised is not None and device is not None and device.lags:
        reply = replace(reply, lags=True)
    # a cell may have left its group
    return reply if dist.is_initialized() else replace(reply, group_wanting=True)
