"""The wheel and the sdist install and load in an empty environment, static files included."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.timeout(600)  # pip and its packages come over the network


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("kind", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.long)])
def test_it_installs_and_loads_in_an_empty_environment(
    built: Path, tmp_path: Path, kind: str
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    archive = next(built.glob(kind))
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(archive)]
    subprocess.run(install, check=True, timeout=300)
    # Without any dependency: importing the package needs the standard library alone.
    assert run(python, "import gpupool; print(gpupool.__version__)") == "0.1.0"
    # With the dependencies of this environment behind it, but its own copy of gpupool.
    site = run(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib"))
    code = (
        "import pathlib, gpupool\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'gpupool')\n"
        "assert 'spmd' in shell.magics_manager.magics['cell']\n"
        "from gpupool.notebook.monitor import TrainingMonitor\n"
        "assert 'render' in str(TrainingMonitor._esm) and '{' in str(TrainingMonitor._css)\n"
        "print(pathlib.Path(gpupool.__file__).parent)"
    )
    assert run(python, code).startswith(site)


def test_the_wheel_holds_the_package_and_nothing_else_the_sdist_what_make_needs(
    built: Path,
) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gpupool").rglob("*.*")}
    assert names == {file for file in files if "__pycache__" not in file}
    assert {"gpupool/py.typed", "gpupool/notebook/static/monitor.js"} <= names
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "notebooks/01_quickstart.ipynb"} <= members
    assert {"scripts/apt-install", "binder/start", "docs/quickstart.png"} <= members


def run(python: Path, code: str) -> str:
    """The last line that is printed by code that sees nothing of this checkout."""
    command = [str(python), "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
