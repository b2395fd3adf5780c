"""URLs that would be read as a local path that nobody means. Runs anywhere."""

from __future__ import annotations

import re

from gpupool.core.errors import OptionsError
from gpupool.core.terminal import plain
from gpupool.core.wire.masking import without_passwords

# Of these a bucket or a host follows: no local path begins so.
_REMOTE = "s3|s3a|gs|gcs|abfs|abfss|az|oss|oci|hf|http|https|sftp|hdfs"
_ONE_SLASH = re.compile(rf"({_REMOTE}):(?!//)/*(.*)", re.DOTALL)
# fsspec would join what follows "file://" to the folder of the rank, the password in its name.
_HOST = re.compile(r"(?:file|local)://(?!/)(.*)", re.DOTALL)
_USER = re.compile(r"[^/:@]+:[^/@][^@]*@(.*)", re.DOTALL)


def refuse_typo(url: str, name: str = "") -> None:
    """Raise OptionsError for "s3:/bucket", "file://host/x" and "user:password@host/x".

    Args:
        name: of the option that it is given as, if it is one.
    """
    # Masked in its right form: what has no two slashes is no URL in which a password is found.
    if (found := _ONE_SLASH.fullmatch(url)) is not None:
        meant = plain(without_passwords(f"{found[1]}://{found[2]}"))
        problem = (
            f"two slashes follow '{found[1]}:' in a URL. Did you mean {meant}? (A local "
            f"folder of that name is written './{found[1]}:'.)"
        )
    elif (found := _HOST.match(url)) is not None:
        shown = plain(without_passwords(url))
        problem = (
            f"{shown} names a host, and file:// reads this machine's files: a local path "
            f"is written file:///path, with three slashes, or /path."
        )
    elif (found := _USER.match(url)) is not None:
        problem = (
            f"***@{plain(found[1])} has a user and a password but no protocol: write "
            "it as PROTOCOL://..., or a local folder of that name as './...'."
        )
    else:
        return
    option = f"{name}: " if name else ""
    raise OptionsError(f"{option}{problem}")
