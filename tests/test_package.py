"""The files of a release: they install and load, come out the same, and tell what they need."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("kind", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.long)])
def test_it_installs_and_loads_in_an_empty_environment(
    built: Path, tmp_path: Path, kind: str
) -> None:
    venv.create(tmp_path / "env", with_pip=False)  # which this environment's pip installs into
    python = tmp_path / "env" / "bin" / "python"
    archive = next(built.glob(kind))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile", "--no-deps", str(archive)]
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
        "from gpupool.notebook.monitor.widget import TrainingMonitor\n"
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
    assert {"py.typed", "__init__.pyi", "notebook/static/monitor.js"} <= {
        name.removeprefix("gpupool/") for name in names
    }
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "notebooks/01_quickstart.ipynb"} <= members
    assert {"scripts/apt-install", "binder/start", "docs/quickstart.png"} <= members


@pytest.fixture(scope="module")
def released(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Release files twice: from a repository, and from the sdist under other circumstances."""
    repository = unpacked(built, tmp_path_factory.mktemp("one"), 0o022)
    for command in ("init", "add --all", "-c user.name=n -c user.email=e commit --message=all"):
        subprocess.run(
            ["git", *command.split()],
            cwd=repository,
            env={**os.environ, "GIT_COMMITTER_DATE": "1790000000 +0300"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    first = release(repository, 0o022, TZ="America/New_York", LC_ALL="C", PYTHONHASHSEED="1")
    sdist = unpacked(built, tmp_path_factory.mktemp("another folder"), 0o077)
    changed = {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}
    second = release(sdist, 0o077, SOURCE_DATE_EPOCH="1790000000", **changed)
    assert (first.stdout, first.stderr) == (second.stdout, "")
    return repository / "dist", sdist / "dist"


def test_release_files_are_the_same_bytes_wherever_and_whenever_they_are_built(
    released: tuple[Path, Path],
) -> None:
    first, second = ({file.name: sha256(file) for file in dist.iterdir()} for dist in released)
    assert first == second
    kinds = {name.removeprefix("gpupool-0.1.0") for name in first}
    assert kinds == {"-py3-none-any.whl", ".cdx.json", ".tar.gz"}
    with zipfile.ZipFile(next(released[0].glob("*.whl"))) as wheel:
        assert {info.date_time[:3] for info in wheel.infolist()} == {(2026, 9, 21)}


def test_what_is_in_no_commit_is_not_released(released: tuple[Path, Path]) -> None:
    repository, sdist = (dist.parent for dist in released)
    (repository / "gpupool" / "stray.py").touch()
    assert "?? gpupool/stray.py" in release(repository, 0o022).stderr
    assert "set SOURCE_DATE_EPOCH" in release(sdist, 0o022).stderr


def test_the_list_of_needs_has_every_dependency_and_nothing_of_the_machine(
    released: tuple[Path, Path],
) -> None:
    text = next(released[0].glob("*.cdx.json")).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)
    needed = {canonicalize_name(one["name"]): one for one in found["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {one.name: one for one in map(Requirement, project["dependencies"])}
    for name, one in direct.items():
        assert one.specifier.contains(needed[name]["version"], prereleases=True), one
    itself = found["metadata"]["component"]
    edges = {edge["ref"]: edge.get("dependsOn", []) for edge in found["dependencies"]}
    assert {ref.partition("==")[0] for ref in edges[itself["bom-ref"]]} == direct.keys()
    assert itself["hashes"][0]["content"] == sha256(next(released[0].glob("*.whl")))
    assert {"pyzmq", "botocore"} <= needed.keys()  # what is needed by what is needed
    assert not {"pytest", "ruff", "hatchling", "simplejpeg", "gpupool"} & needed.keys()
    assert all(needed[name].get("licenses") for name in direct.keys() - {"torchvision"})
    for name, component in needed.items():
        told = str(importlib.metadata.metadata(name).values())
        assert component["purl"] == f"pkg:pypi/{name}@{component['version']}"
        for link in component["externalReferences"]:  # none of where it was got from
            assert link["url"].rstrip("/") in told, link
    assert not re.findall(rf'"/|file:|\b{re.escape(socket.gethostname())}\b', text)
    assert "serialNumber" not in found


def unpacked(built: Path, folder: Path, umask: int) -> Path:
    """The files of the sdist, as somebody with this umask has them."""
    archive = next(built.glob("*.tar.gz"))
    command = ["tar", "--extract", "--no-same-permissions", "--file", str(archive)]
    subprocess.run([*command, "--touch"], cwd=folder, check=True, umask=umask)
    (top,) = folder.iterdir()
    return top


def release(folder: Path, umask: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the release files of a folder."""
    return subprocess.run(
        [sys.executable, "scripts/release.py"],
        cwd=folder,
        umask=umask,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run(python: Path, code: str) -> str:
    """The last line that is printed by code that sees nothing of this checkout."""
    command = [str(python), "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
