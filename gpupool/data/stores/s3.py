"""`get` and `find` by obstore, with the settings and keys of an s3fs. Runs anywhere; no torch.

It costs a tenth of the CPU time of s3fs. What it cannot do raises, or has no store: s3fs is the
meaning, and its error the one that is told.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from gpupool.data.stores.threads import in_threads

Entry = dict[str, Any]  # obstore's ObjectMeta: "path", "size", "e_tag"
# Changing one of them changes which keys and which server s3fs would find.
_VARIABLES = re.findall(
    rb"\w+",
    b"AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_PROFILE AWS_ENDPOINT_URL "
    b"AWS_ENDPOINT_URL_S3 AWS_DEFAULT_REGION AWS_REGION AWS_CONFIG_FILE AWS_ROLE_ARN "
    b"AWS_SHARED_CREDENTIALS_FILE AWS_WEB_IDENTITY_TOKEN_FILE AWS_CA_BUNDLE",
)
# Options of s3fs that obstore has too; with any other one s3fs reads alone.
_OPTIONS = re.compile(
    "anon|key|secret|token|profile|endpoint_url|requester_pays|client_kwargs|config_kwargs|"
    "use_listings_cache|region_name|verify|retries|max_pool_connections|(connect|read)_timeout"
)
_AWS = re.compile(r"https://s3\.([a-z0-9-]+\.)?amazonaws\.com(\.cn)?$")
_WHOLE_TIMEOUT = timedelta(hours=1)  # obstore's own default of 30 s would cut large files
_RECONNECT_S = 10.0  # finding credentials may ask the machine's metadata service
_AT_ONCE = 16
_PAGE = 1000

_lock = threading.Lock()
_stores: dict[tuple[Any, str], Any] = {}
_used_by: int | None = None  # the process whose threads obstore has: in a forked one it would hang
_generation = 0
_environment: tuple[bytes | None, ...] | None = None  # what the file systems were last made from
# A forked child must not wait for a thread that only its parent has.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def generation() -> tuple[int, int]:
    """Another one when file systems are to be made anew: for other variables, or after a fork.

    1 microsecond: to ask `os.environ` for each variable would take 20.
    """
    variables = tuple(map(os.environ._data.get, _VARIABLES))  # type: ignore[attr-defined]
    if variables != _environment:  # also at the first use: the user may have made some before
        refresh_filesystems((_generation, os.getpid()))
    return _generation, os.getpid()


def refresh_filesystems(seen: tuple[int, int] | None = None) -> None:
    """Make every file system of this process use the credentials that are now set; in any thread.

    An s3fs instance keeps the keys that it found first, and fsspec hands the same instance out
    again. So each reconnects in place, which serves those that a user holds too; file systems of
    other kinds are forgotten. A read under way ends on its old connection.

    Does nothing if another thread has done so since `seen` was its `generation`.
    """
    import fsspec

    global _generation, _environment
    with _lock:
        if seen not in (None, (_generation, os.getpid())):
            return
        _generation += 1
        _environment = tuple(map(os.environ._data.get, _VARIABLES))  # type: ignore[attr-defined]
        _stores.clear()
        for kind in set(fsspec.registry.values()):
            if kind.__name__ != "S3FileSystem":
                kind.clear_instance_cache()
        s3fs = sys.modules.get("s3fs")
        for filesystem in list(s3fs.S3FileSystem._cache.values()) if s3fs else ():
            filesystem.invalidate_cache()
            try:
                filesystem.connect(refresh=True, timeout=_RECONNECT_S)
            except Exception:
                filesystem._s3 = None  # the next use connects it, and says why it cannot


def store(filesystem: Any, bucket: str) -> Any:
    """obstore's store of a bucket, or None where s3fs is to be asked alone."""
    global _used_by
    with _lock:
        _used_by = _used_by or os.getpid()
        if _used_by != os.getpid():
            return None
        if (filesystem, bucket) not in _stores:
            _stores[filesystem, bucket] = _connected(filesystem, bucket)
        return _stores[filesystem, bucket]


def _connected(filesystem: Any, bucket: str) -> Any:
    options = filesystem.storage_options
    client_options = options.get("client_kwargs") or {}
    given = [*options, *client_options, *(options.get("config_kwargs") or {})]
    meta, verify = filesystem.s3.meta, client_options.get("verify")
    endpoint, region, is_aws = meta.endpoint_url, meta.region_name, _AWS.match(meta.endpoint_url)
    is_odd = meta.config.s3 or ("amazonaws" in endpoint and not is_aws)  # in how it names a bucket
    if is_odd or not all(map(_OPTIONS.fullmatch, given)):
        return None
    if is_aws:
        region = _region(filesystem, bucket) or region
        endpoint = endpoint if region in endpoint else f"https://s3.{region}.amazonaws.com"
    client: Any = {
        "allow_http": endpoint.startswith("http://"),
        "allow_invalid_certificates": verify is False,
        "connect_timeout": timedelta(seconds=meta.config.connect_timeout),
        "read_timeout": timedelta(seconds=meta.config.read_timeout),
        "timeout": _WHOLE_TIMEOUT,
    }
    authority = verify or filesystem.session.get_config_variable("ca_bundle")
    if isinstance(authority, str):
        client["root_certificate"] = Path(authority).read_bytes()
    from obstore.store import S3Store

    return S3Store(
        bucket,
        # all of what obstore would otherwise take from the environment by rules of its own
        config={
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "region": region,
            "virtual_hosted_style_request": False,
            "skip_signature": bool(filesystem.anon),
            "request_payer": bool(options.get("requester_pays")),
        },
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},  # retry.py does, and counts
        credential_provider=None if filesystem.anon else _keys(filesystem),
    )


def _region(filesystem: Any, bucket: str) -> str | None:
    """Where a bucket of AWS is; it says so also to those that may not look at it."""
    try:
        answer = filesystem.call_s3("head_bucket", Bucket=bucket)
    except Exception as error:
        answer = getattr(error.__cause__, "response", None) or {}
    headers: dict[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers.get("x-amz-bucket-region")


def _keys(filesystem: Any) -> Callable[[], Any]:
    """What obstore asks, in its own threads, for the keys that an s3fs has at the moment."""
    from fsspec.asyn import sync

    given = (filesystem.key, filesystem.secret, filesystem.token)

    def keys() -> dict[str, Any]:
        expires, (access_key, secret_key, token) = None, given
        if not access_key:
            found = sync(filesystem.loop, filesystem.session.get_credentials)
            access_key, secret_key, token = sync(filesystem.loop, found.get_frozen_credentials)[:3]
            expires = getattr(found, "_expiry_time", None)  # it has no public name
        return {
            "access_key_id": access_key,
            "secret_access_key": secret_key,
            "token": token,
            "expires_at": expires and expires.astimezone(UTC),
        }

    return keys


def get(store: Any, key: str, start: int, length: int | None) -> tuple[bytes, int, str]:
    """The bytes of an object from `start`, `length` of them or all; its size, its ETag."""
    options: dict[str, Any] = {"range": {"offset": start}} if start else {}
    if length is not None:
        options = {"range": (start, start + length)}
    result = store.get(key, options=options)
    meta = result.meta  # made anew each time it is asked for
    return bytes(result.bytes()), meta["size"], _etag(meta)


def find(
    store: Any, prefix: str, on_progress: Callable[[int], object], done: dict[str, list[Entry]]
) -> list[tuple[str, int, str]]:
    """Path, size and ETag of all objects below a prefix ("" or one that ends in "/").

    Keys come by pages of 1,000, each of which takes the store tens of milliseconds: folders are
    listed at the same time. `done` keeps what was found: another try, after an error, asks for the
    rest.
    """
    top = store.list_with_delimiter(prefix or None)
    folders = [f"{one.rstrip('/')}/" for one in top["common_prefixes"]]

    def list_below(folder: str) -> list[Entry]:
        if folder not in done:
            found: list[Entry] = []
            for page in store.list(folder, chunk_size=_PAGE):
                found += page
                on_progress(len(found) + sum(map(len, list(done.values()))))
            # Of a key that ends in "/", as the folder's own may, obstore leaves the "/" out.
            done[folder] = [one for one in found if len(one["path"]) > len(folder)]
        return done[folder]

    skip = len(prefix)
    below = chain.from_iterable(in_threads(list_below, folders, _AT_ONCE))
    found = (one for one in chain(top["objects"], below) if len(one["path"]) > skip)
    return [(one["path"][skip:], one["size"], _etag(one)) for one in found]


def _etag(meta: Entry) -> str:
    return (meta["e_tag"] or "").strip('"')
