"""The environment variables of the process in which tests run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


def plain_environment() -> dict[str, str]:
    """The variables of this process, without this machine's AWS settings and folders."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    plain["AWS_CONFIG_FILE"] = plain["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    plain["AWS_EC2_METADATA_DISABLED"] = "true"
    return plain


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A block in which these are all variables of this process."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
