"""Every function the client may call on an engine: the whole remote interface on one page.

Runs on engines. Each serves the calls of one type of `gpupool/core/wire/calls.py`, which says what
they mean; what it raises becomes a reply too. Work is done elsewhere. What only a training needs is
imported by it: the first engines do not wait for it (`pool/launchers/starter.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from IPython.core.getipython import get_ipython

from gpupool.core.wire import calls as wire
from gpupool.core.wire import invoke
from gpupool.core.wire.calls import Call
from gpupool.core.wire.pickles import Packed
from gpupool.core.wire.replies import (
    CodeReply,
    DebugReply,
    Reply,
    TrainReply,
    Value,
)
from gpupool.core.wire.values import Bindings, ValueInfo
from gpupool.data import device as devices
from gpupool.engine import calls, control
from gpupool.engine.cells import debug, execute, own_modules, torchrun, variables
from gpupool.engine.group import forming
from gpupool.engine.output import status, streams
from gpupool.engine.process import end_at_once, follow_torch, this_rank

_functions: dict[type[Call[Any]], Callable[[Any], Reply[Any]]] = {}


def _serves(
    kind: type[Call[Value]],
) -> Callable[[Callable[[Any], Reply[Value]]], Callable[[Any], Reply[Value]]]:
    """Have a function serve the calls of this type; its reply is theirs."""

    def register(function: Callable[[Any], Reply[Value]]) -> Callable[[Any], Reply[Value]]:
        _functions[kind] = function
        return function

    return register


@_serves(wire.Prepare)
def prepare(call: wire.Prepare) -> Reply[None]:
    """Until here files were made for their owner alone: keys and logs."""
    variables.follow(call.place)
    shell: Any = get_ipython()
    shell.user_ns.update(execute.cell_names(this_rank()))
    execute.adapt(shell)
    control.install()
    end_at_once()
    status.install(shell.kernel)
    # its handler drops what is below, but only when each record has been made
    shell.kernel.log.setLevel(logging.ERROR)
    streams.mask_log(shell.kernel.log)
    torchrun.install()
    return Reply(None)


@_serves(wire.WarmUp)
def warm_up(call: wire.WarmUp) -> Reply[None]:
    torch.zeros(1, device=this_rank().device)
    devices.of(this_rank().device).synchronize()
    return Reply(None)


@_serves(wire.JoinGroup)
def join_group(call: wire.JoinGroup) -> Reply[None]:
    forming.join()
    return Reply(None)


@_serves(wire.FormGroup)
def form_group(call: wire.FormGroup) -> Reply[None]:
    forming.connect(forming.Plan.of(call.plan, this_rank()))
    return Reply(None)


@_serves(wire.RunSource)
def run_source(call: wire.RunSource) -> Reply[CodeReply]:
    work = partial(execute.run_source, call.source, call.cell_number, call.waits)
    return _around(work, call.bindings)


@_serves(wire.RunFunction)
def run_function(call: wire.RunFunction) -> Reply[CodeReply]:
    load = partial(variables.load, call.packed, call.sources)
    return _around(lambda: execute.run_function(load), call.bindings)


@_serves(wire.DebugCommand)
def debug_command(call: wire.DebugCommand) -> Reply[DebugReply]:
    return Reply(debug.command(call.line))


@_serves(wire.Receive)
def receive(call: wire.Receive) -> Reply[Mapping[int, str]]:
    return Reply(variables.receive(call.values))


@_serves(wire.Bind)
def bind(call: wire.Bind) -> Reply[None]:
    return _around(lambda: Reply(None), call.bindings)


@_serves(wire.Look)
def look(call: wire.Look) -> Reply[ValueInfo | None]:
    return Reply(variables.look(call.name, call.path, call.text_chars))


@_serves(wire.Attributes)
def attributes(call: wire.Attributes) -> Reply[Sequence[str]]:
    return Reply(variables.attributes(call.name, call.path))


@_serves(wire.Fetch)
def fetch(call: wire.Fetch) -> Reply[Packed]:
    return Reply(variables.fetch(call.name, call.path, call.out_path))


@_serves(wire.FetchState)
def fetch_state(call: wire.FetchState) -> Reply[Packed]:
    from gpupool.engine import state_sync

    return Reply(state_sync.fetch(call.names, call.out_path))


@_serves(wire.SyncState)
def sync_state(call: wire.SyncState) -> Reply[None]:
    from gpupool.engine import state_sync

    def work() -> Reply[None]:
        state_sync.take_over(call.packed)
        return Reply(None)

    return _around(work, call.bindings)


@_serves(wire.Train)
def train(call: wire.Train) -> Reply[TrainReply]:
    from gpupool.engine import jobs

    return _by_default_on_cpu(lambda: jobs.train(call))


@_serves(wire.Predict)
def predict(call: wire.Predict) -> Reply[None]:
    from gpupool.engine import inference

    def run() -> Reply[None]:
        inference.predict(call.job, call.result_path)
        return Reply(None)

    return _by_default_on_cpu(run)


@_serves(wire.Evaluate)
def evaluate(call: wire.Evaluate) -> Reply[Mapping[str, float]]:
    from gpupool.engine import inference

    return _by_default_on_cpu(lambda: Reply(inference.evaluate(call.job)))


@_serves(wire.Confusion)
def confusion(call: wire.Confusion) -> Reply[Sequence[Sequence[int]] | None]:
    from gpupool.engine import inference

    return _by_default_on_cpu(lambda: Reply(inference.confusion(call.job)))


def _by_default_on_cpu(work: Callable[[], Reply[Value]]) -> Reply[Value]:
    """`work` without the default device that a cell has set: samples are made on CPU."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return work()
    torch.set_default_device(None)
    try:
        return work()
    finally:
        torch.set_default_device(device)


def _around(work: Callable[[], Reply[Value]], bindings: Bindings | None) -> Reply[Value]:
    """`variables.around`; the reply says also which parcels are lost, and have to be sent again,
    and whether the pool has to form its group again."""
    guarded = partial(execute.guarded, work)
    if bindings is not None:
        reply = execute.guarded(lambda: variables.around(guarded, bindings))
        reply = replace(reply, lost=variables.lost(bindings.values.numbers.values()))
    else:
        reply = guarded()
    device = devices.in_use()
    if reply.raised is not None and device is not None and device.lags:
        reply = replace(reply, lags=True)
    return replace(reply, group_wanting=True) if forming.is_wanting() else reply


# ---- how a call comes here --------------------------------------------------------------------


def serve_calls() -> None:
    """Have this process serve what `invoke` asks for."""
    invoke.serve = _serve


def _serve(call: Call[Any]) -> Reply[Any]:
    if call.is_shown:
        shell: Any = get_ipython()
        # ipykernel says it to `sys.stdout`, whoever that is.
        streams.follow_call(shell.kernel.get_parent("shell"))
    else:
        streams.show_nothing()

    def work() -> Reply[Any]:
        if call.reloaded is not None:
            own_modules.load_again(call.reloaded)
        follow_torch(call.torch_settings)
        return _functions[type(call)](call)

    guarded = partial(execute.guarded, work)
    return guarded() if call.number is None else calls.serve(call.number, guarded)
