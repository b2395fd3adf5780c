"""What binder/ says fits pyproject.toml; Binder itself is not run here."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"


def test_the_environment_has_what_pyproject_wants() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (BINDER / "environment.yml").read_text().replace("pytorch-cpu", "torch").splitlines()
    named = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    of_torch = {need for need in wanted["dependencies"] if need.startswith("torch")}
    assert of_torch <= set(named)
    (python,) = (name.removeprefix("python=") for name in named if name.startswith("python="))
    assert f"Programming Language :: Python :: {python}" in wanted["classifiers"]
    assert '".[demo]"' in (BINDER / "postBuild").read_text()


def test_its_scripts_can_be_executed() -> None:
    assert [name for name in ("postBuild", "start") if not os.access(BINDER / name, os.X_OK)] == []
