"""What the options of s3fs mean for another client: pure. Runs anywhere; no torch.

>>> read_options({"key": "AK", "secret": "s", "client_kwargs": {"region_name": "eu-west-1"}})
S3Options(region='eu-west-1')
>>> read_options({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}) is None
True
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# s3fs's own caches and buffers, which nothing here has
_WITHOUT_MEANING = {
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "max_concurrency",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
    "use_ssl",  # only without an endpoint, whose scheme says it: looked at below
}
_NAMES = {  # in storage_options -> here
    "anon": "anonymous",
    "endpoint_url": "endpoint",
    "key": "key",
    "password": "secret",
    "profile": "profile",
    "requester_pays": "requester_pays",
    "secret": "secret",
    "token": "token",
    "username": "key",
}
_CLIENT_NAMES = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "verify": "verify",
}
_CONFIG_NAMES = {"connect_timeout": "connect_timeout_s", "read_timeout": "read_timeout_s"}
# An ordinary bucket: no access point, no directory bucket, whose addresses follow other rules.
_BUCKET_URL = re.compile(r"s3a?://(?P<bucket>[A-Za-z0-9][\w.-]{1,62})(?P<path>(/[^?#]*)?)")

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class S3Options:
    """What a user has set for one URL; None where botocore's own chain decides."""

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    anonymous: bool = False
    endpoint: str | None = None
    region: str | None = None
    addressing: str | None = None  # "path", "virtual" or "auto"
    verify: bool | str | None = None  # False: any certificate; a str: file with the certificates
    requester_pays: bool = False
    read_timeout_s: float | None = None
    connect_timeout_s: float | None = None

    def __repr__(self) -> str:
        """The options that are set and no secrets."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        is_set = [
            f"{name}={value!r}" for name, value in shown.items() if value not in (None, False)
        ]
        return f"S3Options({', '.join(is_set)})"


def read_options(options: Mapping[str, Any]) -> S3Options | None:
    """The options of s3fs, or None if one is among them that only s3fs knows what to do with."""
    found: dict[str, Any] = {}
    client = dict(options.get("client_kwargs") or {})
    config = dict(options.get("config_kwargs") or {})
    addressing = dict(config.pop("s3", None) or {})
    found["addressing"] = addressing.pop("addressing_style", None)
    top = {k: v for k, v in options.items() if k not in ("client_kwargs", "config_kwargs")}
    uses_ssl = top.get("use_ssl", client.pop("use_ssl", True))
    for given, names in ((client, _CLIENT_NAMES), (config, _CONFIG_NAMES), (top, _NAMES)):
        for name, value in given.items():
            if name in names and value is not None:
                found[names[name]] = value
            elif name not in names and (given is not top or name not in _WITHOUT_MEANING):
                return None
    if addressing or not (uses_ssl or found.get("endpoint")):
        return None
    if bool(found.get("key")) != bool(found.get("secret")):
        return None
    return S3Options(**found)


def split_url(url: str) -> tuple[str, str] | None:
    """(bucket, path below it without slashes at its ends), or None if it is no plain S3 URL.

    >>> split_url("s3://photos/train/")
    ('photos', 'train')
    >>> split_url("simplecache::s3://photos/train") is None
    True
    """
    found = _BUCKET_URL.fullmatch(url)
    if found is None or found["bucket"].endswith("--x-s3"):
        return None
    path = found["path"].removeprefix("/").removesuffix("/")
    return (found["bucket"], path) if not path or is_plain(path) else None


def is_plain(path: str) -> bool:
    """Whether a key has the form of a path, which is all that obstore can name.

    >>> is_plain("a/b.jpg"), is_plain("a//b.jpg"), is_plain("a/../b.jpg"), is_plain("a\\tb.jpg")
    (True, False, False, False)
    """
    return not {"", ".", ".."} & set(path.split("/")) and not _CONTROL.search(path)
