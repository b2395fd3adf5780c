"""A Jupyter server with both front ends, JupyterLab and Notebook 7, for tests."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Literal, Self

import nbformat

from gpupool.pool.launchers.processes import free_ports
from tests.servers.s3 import TIED_TO_PARENT

App = Literal["lab", "notebook"]
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
# Each page would have the server ask Node, if there is one, whether JupyterLab is to be built.
NO_BUILD = {"buildCheck": False, "buildAvailable": False}
SUBSHELLS = "@jupyterlab/apputils-extension:kernels-settings"
# Under each of them a notebook is shown alone, without side bars.
PATHS: dict[App, str] = {"lab": "/doc/tree/", "notebook": "/notebooks/"}

# Trains for real, small enough to begin at once and long enough to be stopped.
SETUP = """\
%load_ext gpupool
%gpupool start --cpu -n 2
import gpupool, ipykernel, torch
features = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(features, features[:, :4].argmax(1))
options = gpupool.TrainingOptions(epochs=1000, batch_size=32)
def train(**more):
    return gpupool.train(torch.nn.Linear(16, 4), data, options=options, **more)
"""


class Lab:
    """A server on loopback, with directories and settings of its own.

    `tmp` is an empty directory; kernels start with `pythonpath` on their path.
    """

    def __init__(self, tmp: Path, pythonpath: Path) -> None:
        self.tmp = tmp
        self._pythonpath = pythonpath
        self._token = secrets.token_hex(16)
        (self._port,) = free_ports(1)

    def __enter__(self) -> Self:
        for name, values in SETTINGS.items():
            self.change_setting(name, values)
        (self.tmp / "work").mkdir()
        command = [sys.executable, "-S", "-c", TIED_TO_PARENT, str(os.getpid())]
        command += [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
        command += [f"--port={self._port}", "--ServerApp.port_retries=0", "--allow-root"]
        command += [f"--ServerApp.root_dir={self.tmp / 'work'}"]
        command += [f"--ServerApp.tornado_settings={{'page_config_data': {NO_BUILD}}}"]
        # `window.jupyterapp`, as JupyterLab's own tests have it
        command += ["--LabApp.expose_app_in_browser=True"]
        command += ["--JupyterNotebookApp.expose_app_in_browser=True"]
        with (self.tmp / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_up(timeout_s=120)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def write(self, name: str, cells: list[str], kernel: str = "python3") -> str:
        about = {"name": kernel, "display_name": kernel, "language": "python"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": about})  # type: ignore[no-untyped-call]
        for source in cells:
            notebook.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
        nbformat.write(notebook, self.path(name))  # type: ignore[no-untyped-call]
        return name

    def path(self, name: str) -> Path:
        return self.tmp / "work" / name

    def add_kernel(self, name: str, first_on_path: Path) -> str:
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "env": {"PYTHONPATH": f"{first_on_path}{os.pathsep}{self._pythonpath}"},
        }
        folder = self.tmp / "data" / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.json").write_text(json.dumps(spec))
        return name

    def change_setting(self, name: str, values: dict[str, Any]) -> None:
        package, plugin = name.split(":")
        file = self.tmp / "settings" / package / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))

    def use_subshells(self, use: bool) -> None:
        """Whether widgets' messages go to a subshell of the kernel, as they do by default."""
        mode = "perCommTarget" if use else "disabled"
        self.change_setting(SUBSHELLS, {"commsOverSubshells": mode})

    def url(self, notebook: str, app: App = "lab") -> str:
        return f"http://127.0.0.1:{self._port}{PATHS[app]}{notebook}?token={self._token}"

    def shut_kernels_down(self) -> None:
        for session in self._ask("/api/sessions"):
            self._ask(f"/api/sessions/{session['id']}", "DELETE")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:  # kernels end by themselves when it is gone
            self._process.kill()
            self._process.wait()

    def _environment(self) -> dict[str, str]:
        """Nothing of the user's settings leaks in; the token is not in the argument list."""
        # With pytest's variable, ipykernel leaves descriptors 1 and 2 alone.
        left_out = ("AWS_", "PYTEST_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "run",
            "JUPYTER_DATA_DIR": "data",
            "IPYTHONDIR": "ipython",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
        }
        private = {name: str(self.tmp / folder) for name, folder in folders.items()}
        extra = {"JUPYTER_TOKEN": self._token, "PYTHONPATH": str(self._pythonpath)}
        return {"OMP_NUM_THREADS": "1", **inherited, **private, **extra}

    def _wait_until_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._ask("/api/status")
                return
            except OSError:  # not listening yet, or just beginning to
                if time.monotonic() > deadline or self._process.poll() is not None:
                    log = (self.tmp / "server.log").read_text()[-3000:]
                    raise RuntimeError(f"JupyterLab did not start:\n{log}") from None
                time.sleep(0.2)

    def _ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            method=method,
            headers={"Authorization": f"token {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            content = reply.read()
        return json.loads(content) if content else None
