"""The wheel and the sdist install and load in an empty environment, static files included."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STATIC = {"monitor.js", "monitor.css"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
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
    subprocess.run(install, check=True, timeout=150)
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


def test_the_archives_hold_the_static_files_and_the_type_marker(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {f"gpupool/notebook/static/{name}" for name in STATIC} <= names
    assert "gpupool/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "demo"))]
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "notebooks/01_quickstart.ipynb"} <= members


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
