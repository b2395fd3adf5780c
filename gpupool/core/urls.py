"""URLs: the secrets in them, and those that would be read as a local path. Runs anywhere."""

from __future__ import annotations

import re
from urllib.parse import unquote

from gpupool.core.errors import OptionsError
from gpupool.core.terminal import plain

# A bucket or host without its two slashes; a host before a local path, which fsspec would join to
# the folder of the rank; a user and a password without a protocol, which would name a folder.
_TYPO = re.compile(
    "(s3|s3a|gs|gcs|abfs|abfss|az|oss|oci|hf|http|https|sftp|hdfs):(?!//)|(file|local)://(?!/)"
    "|[^/:@]+:[^/@][^@]*@"
)
# Before the host of a URL; with a slash in the password, which should be quoted, if no port is
# meant. All repeats that could begin anywhere are bounded, so that a long text takes no longer.
_USERINFO = re.compile(
    r"""(https?:)?//(?:([^\s/]+)|([^\s/:@"']{0,256}:(?![0-9]{1,5}/)[^\s@"']{1,256}))@""",
    re.IGNORECASE,
)
_IN_QUERY = re.compile(
    r"([?&;#][^\s?&;#=/]{0,64}?(?:secret|token|passw|key|credential|sig)[^\s?&;#=/]{0,64}=)"
    r"""([^&\s#"']+)""",
    re.IGNORECASE,
)
_WITHOUT_SCHEME = re.compile(r"[^\s/:@]+:([^\s/@]+)@[^\s/:@]+:[0-9]{1,5}/?")
_TOKEN = re.compile(r"(?=.*[0-9A-Z]).{10,}")  # and no user's name


def refuse_typo(url: str, name: str = "") -> None:
    """Raise OptionsError, of the option `name`, for "s3:/bucket", "file://host/x", "me:x@host"."""
    if _TYPO.match(url):
        shown = plain(without_passwords(re.sub(r".*@", "***@", url, flags=re.DOTALL)))
        option = f"{name}: " if name else ""
        raise OptionsError(
            f"{option}{shown} is neither a URL, as s3://bucket/x or file:///path, "
            "nor a path, as /path or ./name."
        )


def without_passwords(text: str) -> str:
    """`text` without the passwords before the host of a URL, and the signatures after its "?".

    >>> without_passwords("s3://me:secret@bucket/run?X-Amz-Signature=abc")
    's3://***@bucket/run?X-Amz-Signature=***'
    """
    return _IN_QUERY.sub(r"\1***", _USERINFO.sub(r"\1//***@", text))


def passwords(text: str) -> set[str]:
    """The passwords, tokens and signatures in the URLs of a text, as written and decoded.

    >>> sorted(passwords("postgres://ada:p%40ss@host/db?token=abc"))
    ['abc', 'p%40ss', 'p@ss']
    """
    found = {value for _, value in _IN_QUERY.findall(text)}
    for scheme, first, with_slash in _USERINFO.findall(text):
        name, colon, password = (first or with_slash).partition(":")
        is_token = not colon and scheme and _TOKEN.fullmatch(name)
        found.add(name if is_token else password)
    if alone := _WITHOUT_SCHEME.fullmatch(text):
        found.add(alone[1])
    return (found | {unquote(value) for value in found}) - {""}
