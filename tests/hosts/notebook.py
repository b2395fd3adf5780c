"""The notebook of a lab: a process on `login` that runs one cell after the other."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import gpupool
from tests.hosts.lab import ROOT, Lab
from tests.security.lines import Actor, serve

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"


class Notebook:
    """The test's end of it. `within` is a command that runs it, as `salloc` does."""

    def __init__(self, lab: Lab, *within: str, **env: str) -> None:
        log, pipe = lab.log("login", "notebook"), subprocess.PIPE
        command = [*within, sys.executable, "-m", "tests.hosts.notebook"]
        env = {"PYTHONPATH": str(ROOT), **env}
        ends = {"stdin": pipe, "stdout": pipe, "text": True}
        with log.open("w") as said:
            process = lab.popen("login", *command, env=env, stderr=said, **ends)
        self._actor = Actor("notebook", process, log)
        self._asking = ThreadPoolExecutor(1)
        self.pid: str = self.run("str(os.getpid())")

    def run(self, source: str) -> Any:
        """What the last expression of a cell gives; fails if it raises."""
        return ast.literal_eval(self._actor.do("run", source=source))

    def spmd(self, source: str) -> Any:
        """What the last expression of a cell gives on each rank."""
        return self.run(f"dict(pool.run({source!r}, timeout_s=60))")

    def begin(self, source: str) -> Future[dict[str, Any]]:
        """Begin a cell: what comes of it, "value" (its repr), or "error" (class) and "text"."""
        return self._asking.submit(self._actor.ask, "run", source=source)

    def close(self) -> None:
        self._actor.close()
        self._asking.shutdown()


# the process on `login`
names: dict[str, Any] = {"gpupool": gpupool, "os": os}


def start(*arguments: str, **options: Any) -> None:
    """Start the pool: `pool` in all cells."""
    shown = {"progress": lambda text: print(text, flush=True), "device": "cpu"}
    names["pool"] = gpupool.start(*arguments, **shown, **options)


def errors(source: str) -> dict[int, tuple[bool, str]]:
    """Run a cell: rank -> (whether the end of another one freed it, what its error says)."""
    try:
        names["pool"].run(source, timeout_s=120)
    except gpupool.SpmdError as error:
        return {rank: (bool(one.freed), str(one)) for rank, one in error.errors.items()}
    return {}


def run(source: str) -> str:
    """Run a cell; the repr of its last expression."""
    values: list[Any] = [None]
    sys.displayhook = values.append
    exec(compile(ast.Interactive(ast.parse(source).body), "cell", "single"), names)
    return repr(values[-1])


if __name__ == "__main__":
    names |= {"start": start, "errors": errors}
    serve({"run": run})
