"""Every function the client may call on an engine: the whole remote interface on one page.

Runs on engines. Arguments and replies are plain data (a reply is unpickled in the client's IO
thread, so it must not make the notebook import anything). Work is done elsewhere. What only a
training needs is imported by it: the first engines do not wait for it (`pool/processes/agent.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from IPython.core.getipython import get_ipython

from gpupool.core.wire import invoke
from gpupool.core.wire.requests import SetEnvironment
from gpupool.engine import calls, control, inline
from gpupool.engine.cells import debug, execute, torchrun, variables
from gpupool.engine.group import forming
from gpupool.engine.output import log, status
from gpupool.engine.output.recording import Hear
from gpupool.engine.process import end_at_once, this_rank
from gpupool.engine.shell import restoring
from gpupool.engine.shell.cell_names import name_cells_in_warnings
from gpupool.engine.shell.shell import disarm_exit, keep_no_outputs, refuse_prompts, this_shell


def prepare(sys_path: list[str], cwd: str, umask: int) -> dict[str, Any]:
    """Make the engine's names, search path, folder and umask the notebook's; tells pid and torch.

    Until here files were made for their owner alone: keys and logs.
    """
    rank = this_rank()
    variables.follow(sys_path, cwd, umask)
    shell: Any = get_ipython()
    shell.user_ns.update(execute.cell_names(rank))
    control.install()
    end_at_once()
    restoring.install(shell.kernel)
    status.install(shell.kernel)
    # its handler drops what is below, but only when each record has been made
    shell.kernel.log.setLevel(logging.ERROR)
    log.mask()
    disarm_exit(shell)
    refuse_prompts(shell)
    keep_no_outputs(shell)
    torchrun.install()
    name_cells_in_warnings()
    return {"pid": os.getpid(), "torch": str(torch.__version__)}


def join_group(**plan: Any) -> dict[str, Any]:
    """Get ready for the process group of all ranks; "joined" is what `group.join` returns."""
    return execute.guarded(lambda: {"joined": forming.join(_plan(plan))})


def form_group(
    plan: dict[str, Any], generation: int, handles: dict[str, list[str]] | None, num_named: int
) -> dict[str, Any]:
    """Form the process group of all ranks; returns when every rank has."""

    def form() -> dict[str, Any]:
        forming.connect(_plan(plan), generation, handles, num_named)
        return {}

    return execute.guarded(form)


def _plan(plan: dict[str, Any]) -> forming.Plan:
    rank = this_rank()
    return forming.Plan(rank=rank["rank"], world_size=rank["world_size"], **plan)


def set_environment(
    variables: dict[str, str], unset: list[str], refresh: bool = True
) -> dict[str, Any]:
    """Set and remove environment variables; the reply is that of `control.answer`.

    For a rank that has just come up. A busy one is asked over the control channel.
    """
    request = SetEnvironment(variables, unset, refresh)
    return control.answer(request.message_type(), request.content())


def run_source(
    source: str, cell_number: int | None, shipment: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a cell; the reply has "value" (pickled or None) and "text", or "error".

    Args:
        shipment: the notebook's variables that it uses, see `variables.around`; with it the reply
            has "names".
    """

    def run() -> dict[str, Any]:
        return execute.run_source(source, cell_number)

    return _with_group(_around(run, shipment) if shipment else execute.guarded(run))


def run_function(call: dict[str, Any], shipment: dict[str, Any]) -> dict[str, Any]:
    """Call a packed (function, args, kwargs); the reply is that of `run_source`."""

    def run() -> dict[str, Any]:
        return execute.run_function(lambda: variables.load(call))

    return _with_group(_around(run, shipment))


def debug_command(line: str | None) -> dict[str, Any]:
    """A command to the debugger, None to begin; the reply has "text" and "open", or "error"."""
    return execute.guarded(lambda: debug.command(line))


def receive(**parcels: Any) -> dict[str, Any]:
    """Take in values of the notebook; "failed" maps those that cannot be read to the reason."""
    return execute.guarded(lambda: {"failed": variables.receive(**parcels)})


def bind(**shipment: Any) -> dict[str, Any]:
    """Let names mean values of the notebook, as in `run_source`."""
    return _around(dict, shipment)


def look(name: str, path: tuple[str, ...], text_chars: int) -> dict[str, Any]:
    """The "info" on this rank's value of a name, None if it has none."""
    return execute.guarded(lambda: {"info": variables.look(name, path, text_chars)})


def attributes(name: str, path: tuple[str, ...]) -> dict[str, Any]:
    """The public "attributes" of this rank's value of a name."""
    return execute.guarded(lambda: {"attributes": variables.attributes(name, path)})


def fetch(name: str, path: tuple[str, ...], out_path: str) -> dict[str, Any]:
    """This rank's value as a "wire" parcel; a large one is written to the file."""
    return execute.guarded(lambda: {"wire": variables.fetch(name, path, out_path)})


def sync_state(
    source: int, names: list[str], ranks: list[int], shipment: dict[str, Any]
) -> dict[str, Any]:
    """Give names on `ranks` the meaning they have on `source`; all ranks are called at once.

    The reply is that of `sync.sync`, with "names" as in `run_source`.
    """
    from gpupool.engine.state_sync import sync

    return _with_group(_around(lambda: sync.sync(source, names, ranks), shipment))


def train(
    job_path: str, result_path: str, num_ranks: int, on_gpu: bool, again: bool = False
) -> dict[str, Any]:
    """Train as the job in `job_path` says, one of `num_ranks` ranks that do, each on its GPU or all
    on CPU; the first one leaves the weights in `result_path`.

    `again`: go on from the checkpoints of an attempt before.
    """
    from gpupool.engine import jobs

    return _by_default_on_cpu(lambda: jobs.train(job_path, result_path, num_ranks, on_gpu, again))


def predict(job_path: str, result_path: str) -> dict[str, Any]:
    """Run a model over this rank's part of the samples; the outputs go to `result_path`.N."""
    from gpupool.engine import inference

    return _by_default_on_cpu(lambda: inference.predict(job_path, result_path))


def evaluate(job_path: str) -> dict[str, Any]:
    """The "values" of loss and metrics of a model over the samples, the same on every rank."""
    from gpupool.engine import inference

    return _by_default_on_cpu(lambda: inference.evaluate(job_path))


def confusion(job_path: str) -> dict[str, Any]:
    """The "counts" of this rank's samples by true and predicted class; None if it has none."""
    from gpupool.engine import inference

    return _by_default_on_cpu(lambda: inference.confusion(job_path))


def _by_default_on_cpu(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work`, guarded, without the default device that a cell has set: samples are made on CPU."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return execute.guarded(work)
    torch.set_default_device(None)
    try:
        return execute.guarded(work)
    finally:
        torch.set_default_device(device)


def _around(work: Callable[[], dict[str, Any]], shipment: dict[str, Any]) -> dict[str, Any]:
    """`variables.around`, guarded; an error tells which parcels are "lost", to be sent again."""
    reply = execute.guarded(lambda: variables.around(work, **shipment))
    return {**reply, "lost": variables.lost(shipment["numbers"].values())}


def _with_group(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, with "group_wanting" if the pool has to form its group again."""
    return {**reply, "group_wanting": True} if forming.is_wanting() else reply


# ---- the notebook's own process as the one rank: see inline.py --------------------------------


def inline_join(rank: dict[str, Any], gpu_uuid: str | None, folder: str) -> dict[str, Any]:
    """Make this process rank 0 of 1; tells its "device", "num_threads" and "covered" names."""
    return inline.join(rank, gpu_uuid, Path(folder))


def inline_form_group(store_path: str, backend: str) -> dict[str, Any]:
    """Form the process group of this process alone."""
    return execute.guarded(lambda: inline.form_group(store_path, backend))


def inline_call(name: str, payload: dict[str, Any], hear: Hear) -> dict[str, Any]:
    """Call a function of this page; `hear` is called with what is shown meanwhile."""
    if name == "run_source":
        this_shell()  # now, so that its displays are seen too
    replaced: dict[str, Any] = {
        "run_source": _inline_run_source,
        "run_function": inline.run_function,
        "train": inline.keeping_random_state(train),
    }
    return inline.call(replaced.get(name, globals()[name]), payload, hear)


def inline_set(name: str, value: object) -> None:
    """Let a name of the cells mean this very object."""
    this_shell().user_ns[name] = value


def _inline_run_source(source: str, cell_number: int | None, shipment: None) -> dict[str, Any]:
    return _with_group(inline.run_source(source, cell_number))


def inline_control(message_type: str, content: dict[str, Any]) -> dict[str, Any]:
    """Do what a control request asks for, here and now; replies as `control.answer` does."""
    return control.answer(message_type, content)


def inline_leave() -> None:
    """Make this process what it was before `inline_join`."""
    inline.leave()


# ---- how a call comes here --------------------------------------------------------------------


def serve_calls() -> None:
    """Have this process serve what `invoke` asks for."""
    invoke.serve = _serve


def _serve(name: str, payload: dict[str, Any], number: int | None) -> Any:
    function = globals()[name]
    return function(**payload) if number is None else calls.serve(number, function, payload)
