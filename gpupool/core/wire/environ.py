"""Which environment variables travel to the ranks, and which only over the encrypted channel.

Runs anywhere. Whoever may look at a process can read the environment that it has started with. So
ordinary variables are inherited; one whose value is a URL with a password, as HTTPS_PROXY, is sent
after the start; one whose name sounds like a secret is sent if asked for (`%gpupool env`). A pool
that is started for data which this notebook has listed with its keys is asked for with these keys.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from gpupool.core.errors import OptionsError
from gpupool.core.terminal import plain
from gpupool.core.urls import passwords

RANK = "GPUPOOL_RANK"  # what rank an engine is, in its environment
POOL_FOLDER = "GPUPOOL_POOL_FOLDER"  # the pool's private folder on an engine's host

# What process groups read. A failed collective must raise, not end the process with the user's
# variables.
_OF_GROUPS = {
    "TORCH_GLOO_LAZY_INIT": "0",  # nobody would look who it is: engine/group/gloo_sockets.py
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
    "NCCL_RAS_ENABLE": "0",  # its thread listens at a fixed port, for which two pools would fight
}
# In these the user's own setting wins.
_OF_GROUPS_BY_DEFAULT = {
    # torch writes its record of collectives into the home at each failure that it detects, and
    # waits for that: a rank whose peer was killed would leave its group a minute later.
    "TORCH_FR_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Each rank sees one GPU, as number 0: symmetric memory takes them for one and the same.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
_ON_ONE_HOST = {
    # No plug-in for InfiniBand and the like, which opens devices that one machine does not need.
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",  # into the rank's log; pool/upkeep/forming.py quotes it
}

AWS_KEY_NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CREDENTIAL_EXPIRATION",
)
_used: set[str] = set()  # names of variables with keys, see `note_use`

_SECRET_NAME = re.compile(
    r"KEY|SECRET|TOKEN(?!IZER)|PASSW|PASSPHRASE|CREDENTIAL|AUTH|SIGNATURE|COOKIE"
    # The last: ipyparallel's key, which a notebook that runs in an engine itself has there.
    r"|CONNECTION_?STRING|_(PASS|PWD|PAT|SAS)$|^IPP_CONNECTION_INFO$"
    # Whole words: HOTPLUG is none, nor is PRIVATE_NETWORK.
    r"|(^|_)((JWT|CREDS?|DSN|WEBHOOKS?|BEARER|T?OTP)(_|$)|PRIVATE$)",
    re.IGNORECASE,
)
# These say where a secret lies; its keeper is the file's mode.
_PLACE_NAME = re.compile(r"_(FILE|PATH|DIR|SOCK)$", re.IGNORECASE)
_MIN_SECRET_LENGTH = 6  # masking a shorter text would hit ordinary words
# Fingerprints are keyed afresh in every process: equal values look equal within a session, and
# nobody can test guesses against a saved notebook.
_SALT = secrets.token_bytes(16)


def select(
    patterns: Iterable[str], environ: Mapping[str, str], *, strict: bool = True
) -> dict[str, str]:
    """The variables of `environ` whose names match one of the names or globs.

    If `strict`, one that matches nothing is an OptionsError; a value typed behind it is not shown.
    """
    chosen: dict[str, str] = {}
    for pattern in patterns:
        found = {k: v for k, v in environ.items() if fnmatchcase(k, pattern)}
        if strict and not found:
            name, equals, _ = plain(pattern).partition("=")
            raise OptionsError(
                f"{name}{equals} is not set in the notebook's environment, which values come from."
            )
        chosen.update(found)
    return dict(sorted(chosen.items()))


def note_use(url: object) -> None:
    """This process has used, or will use, the keys in its environment for what is at `url`."""
    if str(url).startswith(("s3://", "s3a://")):
        _used.update(AWS_KEY_NAMES)


def used(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of `environ` that hold keys which this process has used for its data."""
    return tuple(sorted(name for name in _used if environ.get(name)))


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that processes of a pool are started with: nothing that is secret."""
    return {k: v for k, v in environ.items() if not _is_secret(k) and not passwords(v)}


def for_groups(interface: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """What process groups are to find set, and what else where the host's environment lacks it.

    Other hosts reach this one at `interface`; without them ("") all listen on loopback alone,
    whatever the user has set.

    >>> for_groups()[0]["NCCL_SOCKET_IFNAME"], for_groups("eth1")[1]["NCCL_SOCKET_IFNAME"]
    ('=lo', '=eth1')
    """
    name = interface or "lo"
    # "=" is for this very name: "lo" alone means "lo0" and "local1" to NCCL as well
    interfaces = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    if interface:
        # and the log says which network NCCL has chosen
        return _OF_GROUPS, _OF_GROUPS_BY_DEFAULT | interfaces | {"NCCL_DEBUG": "INFO"}
    return _OF_GROUPS | interfaces, _OF_GROUPS_BY_DEFAULT | _ON_ONE_HOST


def sent_after_start(environ: Mapping[str, str]) -> dict[str, str]:
    """The part that the ranks need as they need what is inheritable, but that holds a password."""
    return {k: v for k, v in environ.items() if not _is_secret(k) and passwords(v)}


def fingerprint(value: str) -> str:
    """Six hex digits that tell two values apart and nothing about either.

    >>> fingerprint("x") == fingerprint("x"), fingerprint("x") == fingerprint("y")
    (True, False)
    """
    return hashlib.blake2b(os.fsencode(value), key=_SALT, digest_size=3).hexdigest()


def secret_values(variables: Mapping[str, str]) -> set[str]:
    """What to mask: the values of variables named like a secret, and the passwords in URLs."""
    values: set[str] = set()
    for name, value in variables.items():
        values |= passwords(value)
        if _is_secret(name):
            values.add(value)
    return {value for value in values if len(value) >= _MIN_SECRET_LENGTH}


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _PLACE_NAME.search(name)
