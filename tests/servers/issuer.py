"""A real issuer of short-lived AWS keys: a program that botocore runs (`credential_process`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_PROGRAM = """
import datetime, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
orders = json.loads((folder / "orders.json").read_text())
if orders["fails"]:
    sys.exit(orders["fails"])
counter = folder / "counter"
number = int(counter.read_text()) + 1
new = folder / "counter.new"
new.write_text(str(number))
new.replace(counter)  # never seen half
now = datetime.datetime.now(datetime.timezone.utc)
print(json.dumps({
    "Version": 1,
    "AccessKeyId": f"ASIA{number:016d}",
    "SecretAccessKey": f"{orders['canary']}/{number:04d}+",
    "SessionToken": f"token-{orders['canary']}-{number:04d}",
    "Expiration": (now + datetime.timedelta(seconds=orders["lifetime_s"])).isoformat(),
}))
"""


class Issuer:
    """Issues keys number 1, 2, 3 ... that are good for `lifetime_s` seconds each.

    `env` makes botocore's chain in this process come here.
    """

    def __init__(self, folder: Path, lifetime_s: float, canary: str = "canary81q7wLm0") -> None:
        self._folder = folder
        self._orders = {"lifetime_s": lifetime_s, "canary": canary, "fails": ""}
        (folder / "counter").write_text("0")
        (folder / "issue.py").write_text(_PROGRAM)
        config = folder / "config"
        config.write_text(
            f"[profile lab]\nregion = us-east-1\n"
            f"credential_process = {sys.executable} -S {folder / 'issue.py'} {folder}\n"
        )
        self.env = {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "lab"}
        self._write()

    @property
    def num_issued(self) -> int:
        return int((self._folder / "counter").read_text())

    def fail(self, message: str) -> None:
        """From now on say this instead of issuing keys; "" issues them again."""
        self._orders["fails"] = message
        self._write()

    def _write(self) -> None:
        path = self._folder / "orders.json"
        path.with_suffix(".new").write_text(json.dumps(self._orders))
        path.with_suffix(".new").replace(path)  # never seen half
