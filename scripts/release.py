"""Build the files of a release into dist/: the same bytes wherever and whenever that is done.

They are the sdist, the wheel, and a list in the format of CycloneDX of what the wheel needs, in the
versions that are installed beside the Python that runs this. SOURCE_DATE_EPOCH dates them, or else
the last commit. hatchling writes its version into the wheel: another one gives other bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def main() -> None:
    """Build them, and print their SHA-256 as `sha256sum --check` reads it."""
    os.environ["SOURCE_DATE_EPOCH"] = date_of_files()
    shutil.rmtree(DIST, ignore_errors=True)
    output("-m", "build", "--no-isolation", str(ROOT))
    (wheel,) = DIST.glob("*.whl")
    sbom = json.dumps(needs(wheel), indent=2, sort_keys=True)
    wheel.with_name("-".join(wheel.name.split("-")[:2]) + ".cdx.json").write_text(sbom + "\n")
    for file in sorted(DIST.iterdir()):
        print(f"{sha256(file)}  {file.name}")


def date_of_files() -> str:
    """Seconds since 1970; ends where the files would not be those of a commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    if not (ROOT / ".git").exists():
        sys.exit("no commit dates the files here: set SOURCE_DATE_EPOCH.")
    if changed := git("status", "--porcelain"):
        sys.exit(f"these files are not those of the last commit: commit or remove them.\n{changed}")
    return git("log", "-1", "--format=%ct")


def needs(wheel: Path) -> dict[str, Any]:
    """What the wheel needs without its extras, of what is installed."""
    about = next(one for one in zipfile.Path(wheel).iterdir() if one.name.endswith(".dist-info"))
    itself = importlib.metadata.PathDistribution(about)
    direct = {canonicalize_name(one.name) for one in requirements(itself, {""})}
    names: set[str] = set()
    for one in requirements(itself, {""}):
        reach(one, names, set())
    options = ("--output-reproducible", "--short-PURLs", "--no-validate")  # a test validates
    list_all = ("-m", "cyclonedx_py", "environment", *options, sys.executable)
    found: dict[str, Any] = json.loads(output(*list_all))
    kept = [one for one in found["components"] if canonicalize_name(one["name"]) in names]
    for one in kept:  # where pip got it from is this machine's
        links = one.pop("externalReferences", [])
        one["externalReferences"] = [link for link in links if link["type"] != "distribution"]
    refs = {one["bom-ref"]: canonicalize_name(one["name"]) for one in kept}
    root = {
        "type": "library",
        "bom-ref": f"{itself.name}=={itself.version}",
        "name": itself.name,
        "version": itself.version,
        "purl": f"pkg:pypi/{itself.name}@{itself.version}",
        "licenses": [{"expression": itself.metadata["License-Expression"]}],
        "hashes": [{"alg": "SHA-256", "content": sha256(wheel)}],
    }
    edges = [
        {**edge, "dependsOn": [ref for ref in edge.get("dependsOn", []) if ref in refs]}
        for edge in found["dependencies"]
        if edge["ref"] in refs
    ]
    own = {"ref": root["bom-ref"], "dependsOn": [ref for ref in refs if refs[ref] in direct]}
    found["metadata"]["component"] = root
    return {**found, "components": kept, "dependencies": [own, *edges]}


def reach(one: Requirement, names: set[str], seen: set[tuple[str, str]]) -> None:
    """Add the names of what is required, and of what that needs in turn."""
    node = (canonicalize_name(one.name), ",".join(sorted(one.extras)))
    if node in seen:
        return
    seen.add(node)
    names.add(node[0])
    for further in requirements(importlib.metadata.distribution(one.name), {"", *one.extras}):
        reach(further, names, seen)


def requirements(of: Distribution, extras: set[str]) -> list[Requirement]:
    """What a distribution requires on this machine, with these extras."""
    every = [Requirement(text) for text in of.requires or ()]
    return [
        one
        for one in every
        if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def sha256(file: Path) -> str:
    """In hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    """What git says of this checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def output(*arguments: str) -> str:
    """What this Python prints when it is run with these arguments; ends with its errors, if any."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
