#!/usr/bin/env python3
"""Print what gpupool needs at its lower bounds, as constraints for pip: a `name==version` a line.

scripts/lowest > lowest.txt && pip install --constraint lowest.txt --editable ".[test]"
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

for dependency in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
    found = re.match(r"([\w.-]+)>=([\w.]+)", dependency)
    if not found:
        sys.exit(f'{PROJECT}: "{dependency}" has no lower bound; write name>=version.')
    print("{}=={}".format(*found.groups()))
