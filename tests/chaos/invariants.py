"""What holds after every action, as a user and the machine's `ps` see it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.model import Either, Model, No
from tests.notebook.kernel import Kernel
from tests.support.processes import gone, until

LOOK = """
def _look(names):
    import json, gpupool
    def of(handle, rank):
        try:
            return ["value", handle[rank]]
        except gpupool.GpuPoolError as error:
            return ["error", str(error)]
    found = {}
    for name in names:
        value = globals().get(name)
        if type(value).__name__ == "Composite":
            found[name] = [of(value, rank) for rank in range(len(value))]
        else:
            found[name] = value
    print(json.dumps(found))
"""


class Notebook:
    """A kernel whose files are all in one folder, with the processes that it has started."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self.kernel, self._folder = kernel, folder
        provisioner: Any = kernel.manager.provisioner
        self.process = psutil.Process(provisioner.pid)

    def members(self) -> dict[str, psutil.Process]:
        """ "starter", "controller", "rank 0" ... -> its process."""
        found = {}
        for process in sorted(
            self.process.children(recursive=True), key=psutil.Process.create_time
        ):
            with contextlib.suppress(psutil.NoSuchProcess):
                if (name := _member(process)) and not gone(process.pid):
                    found.setdefault(name, process)  # a newborn is called like its starter
        return found

    def everyone(self) -> Iterator[psutil.Process]:
        """Every process of it on this machine, whoever is its parent; the kernel too."""
        mark = f"TMPDIR={self._folder}\0".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                    yield process

    def only_the_pool(self, world_size: int) -> None:
        """No process is missing and none is left over."""
        pool = {"starter", "controller", *(f"rank {r}" for r in range(world_size))}

        def strangers() -> set[str]:
            running = {p.pid: p for p in self.everyone() if not gone(p.pid)}
            found = {process.pid: name for name, process in self.members().items()}
            found[self.process.pid] = "kernel"
            names = {found.get(pid, f"{process}") for pid, process in running.items()}
            return names ^ {"kernel", *pool}

        until(lambda: not strangers(), 5.0, f"only the pool's processes: {strangers()}")

    def files(self) -> list[Path]:
        """What lies in folders of the pool."""
        return [path for path in self._folder.rglob("gpupool-*/**/*") if path.is_file()]

    def nothing_is_left(self) -> None:
        """The kernel has ended: so has everything that it had started, and its files are gone."""
        until(lambda: gone(*(p.pid for p in self.everyone())), 3.0, "the end of all processes")
        until(lambda: not self.files(), 3.0, f"the end of {self.files()}")


def _member(process: psutil.Process) -> str:
    """What a process is in a pool, "" if it is none of it."""
    names = {"gpupool:starter": "starter", "gpupool:control": "controller"}
    parent, name = process.parent(), process.name()
    if name.startswith("gpupool:rank") and parent and parent.name() == "gpupool:starter":
        return f"rank {name.removeprefix('gpupool:rank')}"
    return names.get(name, "")


def names_mean_what_they_must(kernel: Kernel, model: Model) -> None:
    """Each name of the notebook is a value or a handle, and what it says is what the model says.

    What was not certain is so from now on.
    """
    cell = kernel.run(f"_look({model.names})")
    assert cell.status == "ok", cell.error_text
    found = json.loads(cell.text)
    assert {n: found[n] for n in model.notebook} == model.notebook
    for name in sorted(model.handles | model.gone):
        assert isinstance(found[name], list), f"{name} is {found[name]!r}, not a handle"
        for rank in range(len(model.ranks)) if name in model.handles else ():
            _agree(model, name, rank, *found[name][rank])
        for kind, text in found[name] if name in model.gone else ():
            assert kind == "error", f"{name} of another pool: {text}"
            assert "stopped" in text, text


def _agree(model: Model, name: str, rank: int, kind: str, found: Any) -> None:
    expected = model.value(name, rank)
    said = f"{name}[{rank}]: {found!r}, expected {expected}"
    if isinstance(expected, No):
        assert kind == "error", said
        lost = f"was lost with rank {rank}, which "  # so is said too where it may have had one
        assert lost in found or ("no variable" in found and expected is No.NEVER), said
        return
    assert kind == "value", said
    possible = expected.values if isinstance(expected, Either) else (expected,)
    assert found in possible, said
    model.ranks[rank][name] = expected if not isinstance(expected, Either) else found
