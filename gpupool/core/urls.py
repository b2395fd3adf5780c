"""URLs that are meant otherwise: "s3:/bucket" is a local path to everybody else. Runs anywhere."""

from __future__ import annotations

import difflib
import re
import sys
from importlib.metadata import entry_points

from gpupool.core.errors import OptionsError
from gpupool.core.terminal import plain
from gpupool.core.wire.masking import without_passwords

# Those of fsspec, which is not loaded for this.
_KNOWN = """abfs abfss adl arrow_hdfs asynclocal asyncwrapper async_wrapper az blockcache box cached
dask data dbfs dir dropbox dvc file filecache ftp gcs gdrive generic gist git github gs hdfs hf
http https jlab jupyter lakefs libarchive local memory oci ocilake oss pyscript reference root s3
s3a sftp simplecache smb ssh tar tosfs tos wandb webdav webhdfs zip"""
PROTOCOLS = frozenset(_KNOWN.split())
# Of these a bucket or a host follows: no local path begins so.
_REMOTE = "s3|s3a|gs|gcs|abfs|abfss|az|oss|oci|hf|http|https|sftp|hdfs"
_ONE_SLASH = re.compile(rf"({_REMOTE}):(?!//)/*(.*)", re.DOTALL)
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://(.*)", re.DOTALL)


def refuse_typo(url: str, name: str = "") -> None:
    """Raise OptionsError for "s3:/bucket" and "s4://bucket", with what was meant.

    Args:
        name: of the option that it is given as, if it is one.
    """
    option, names = (f"{name}: ", [name]) if name else ("", [])
    if (found := _ONE_SLASH.fullmatch(url)) is not None:
        # Only in its right form: what has one slash is no URL, in which a password could be found.
        meant = plain(without_passwords(f"{found[1]}://{found[2]}"))
        raise OptionsError(
            f"{option}two slashes follow '{found[1]}:' in a URL. Did you mean {meant}? (A local "
            f"folder of that name is written './{found[1]}:'.)",
            "form",
            *names,
        )
    found = _PROTOCOL.fullmatch(url)
    if found is None or "::" in url or found[1] in PROTOCOLS:  # fsspec chains with "::"
        return
    near = difflib.get_close_matches(found[1].lower(), sorted(PROTOCOLS), 1, 0.5)
    # Packages bring protocols of their own, which may look like a typing error.
    if near and not _is_registered(found[1]):
        meant = plain(without_passwords(f"{near[0]}://{found[2]}"))
        raise OptionsError(
            f"{option}there is no protocol {found[1]!r}. Did you mean {meant}?", "form", *names
        )


def _is_registered(protocol: str) -> bool:
    loaded = getattr(sys.modules.get("fsspec.registry"), "registry", {})
    return protocol in loaded or any(
        one.name == protocol for one in entry_points(group="fsspec.specs")
    )
