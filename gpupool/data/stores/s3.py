"""`get` and `find` by obstore, with the settings and keys of an s3fs. Runs anywhere; no torch.

It costs a tenth of the CPU time of s3fs. What it cannot do raises, or has no store: s3fs is the
meaning, and its error the one that is told.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

from gpupool.data.stores import faults
from gpupool.data.stores.interface import Content, FileInfo, OnProgress

Entry = dict[str, Any]  # obstore's ObjectMeta: "path", "size", "e_tag"
Found = tuple[list[Entry], list[str]]  # below a prefix, and the prefixes below it that are to come
# Changing one of them changes which keys and which server s3fs would find.
_VARIABLES = re.findall(
    rb"\w+",
    b"AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_CREDENTIAL_EXPIRATION "
    b"AWS_PROFILE AWS_DEFAULT_PROFILE AWS_ENDPOINT_URL AWS_ENDPOINT_URL_S3 AWS_DEFAULT_REGION "
    b"AWS_REGION AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE AWS_ROLE_ARN AWS_CA_BUNDLE "
    b"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS AWS_WEB_IDENTITY_TOKEN_FILE "
    b"AWS_CONTAINER_CREDENTIALS_FULL_URI AWS_CONTAINER_CREDENTIALS_RELATIVE_URI "
    b"AWS_CONTAINER_AUTHORIZATION_TOKEN AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
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
generation = 0
_environment: tuple[bytes | None, ...] | None = None  # what the file systems were last made from


def _renew_lock() -> None:
    """A forked child must not wait for a thread that only its parent has."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def state() -> tuple[object, ...]:
    """What a store is made from. 1 microsecond: to ask `os.environ` for each would take 20."""
    return generation, os.getpid(), _variables()


def _variables() -> tuple[bytes | None, ...]:
    get = os.environ._data.get  # type: ignore[attr-defined]
    return tuple([get(name) for name in _VARIABLES])


def refresh_if_changed() -> None:
    """Also at the first use: the user may have made file systems before, with other settings."""
    if _environment != _variables():
        refresh_filesystems(generation)


def refresh_filesystems(seen: int | None = None) -> None:
    """Make every file system of this process use the credentials that are now set.

    An s3fs instance keeps the keys that it found first, and fsspec hands the same instance out
    again. So each reconnects in place, which serves those that a user holds too; file systems of
    other kinds are forgotten, and the next use makes new ones. No store is asked anything.

    May be called in any thread while others read: a read under way ends on its old connection.
    Does nothing if another thread has done so since `seen` was the generation.

    Raises CredentialsError, at the end, if the new settings name credentials that are not there.
    """
    import fsspec

    global generation, _environment
    with _lock:
        if seen not in (None, generation):
            return
        generation += 1
        _environment = _variables()
        _stores.clear()
        for kind in set(fsspec.registry.values()):
            if kind.__name__ != "S3FileSystem":
                kind.clear_instance_cache()
        s3fs, failed = sys.modules.get("s3fs"), None
        for filesystem in list(s3fs.S3FileSystem._cache.values()) if s3fs else ():
            filesystem.invalidate_cache()
            try:
                filesystem.connect(refresh=True, timeout=_RECONNECT_S)
            except Exception as error:
                # Nobody needs to know of one that has never connected, or that is of an event loop
                # of the user's.
                if filesystem._s3 is not None and not filesystem.asynchronous:
                    failed = error
        if failed is not None:
            raise faults.sentence(failed, "s3://", {})


def store(filesystem: Any, bucket: str) -> Any:
    """obstore's store of a bucket, or None where s3fs is to be asked alone.

    Raises what s3fs raises when it connects.
    """
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
    if not all(map(_OPTIONS.fullmatch, given)):
        return None
    meta, verify = filesystem.s3.meta, client_options.get("verify")
    endpoint, region, is_aws = meta.endpoint_url, meta.region_name, _AWS.match(meta.endpoint_url)
    if meta.config.s3 or ("amazonaws" in endpoint and not is_aws):  # other ways to address a bucket
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
        expires = None
        access_key, secret_key, token = given
        if not access_key:
            loop, session = filesystem.loop, filesystem.session
            found = sync(loop, session.get_credentials)
            frozen = sync(loop, found.get_frozen_credentials)
            access_key, secret_key, token = frozen.access_key, frozen.secret_key, frozen.token
            expires = getattr(found, "_expiry_time", None)  # it has no public name
        return {
            "access_key_id": access_key,
            "secret_access_key": secret_key,
            "token": token,
            "expires_at": expires and expires.astimezone(UTC),
        }

    return keys


def get(store: Any, key: str, start: int, length: int | None) -> Content:
    """The bytes of an object from `start`, `length` of them or all."""
    options: dict[str, Any] = {"range": {"offset": start}} if start else {}
    if length is not None:
        options = {"range": (start, start + length)}
    result = store.get(key, options=options)
    meta, (begin, end) = result.meta, result.range
    data = bytes(result.bytes())
    if len(data) != end - begin:
        raise asyncio.IncompleteReadError(data, end - begin)
    return Content(data, meta["size"], _etag(meta))


def find(
    store: Any,
    prefix: str,
    on_progress: OnProgress,
    done: dict[str, Found],
    page: int = _PAGE,
) -> tuple[list[FileInfo], list[str]]:
    """All objects below a prefix ("" or one that ends in "/"), in no order, and empty folders.

    Keys come by pages of 1,000, each of which takes the store tens of milliseconds. Where the first
    page shows that there are folders, these are listed at the same time. `done` keeps what was
    found: another try, after an error, asks for the rest.
    """
    from fsspec.asyn import get_loop, sync

    gate, num_found = asyncio.Semaphore(_AT_ONCE), 0

    async def list_all(prefix: str) -> None:
        nonlocal num_found
        async with gate:
            if prefix not in done:
                done[prefix] = await _list_below(store, prefix, page)
        num_found += len(done[prefix][0])
        on_progress(num_found)
        below = map(list_all, done[prefix][1])
        for failed in await asyncio.gather(*below, return_exceptions=True):
            if failed is not None:
                raise failed

    sync(get_loop(), list_all, prefix)
    entries = [entry for found, _ in done.values() for entry in found]
    marks = _folder_marks(store, [entry["path"] for entry in entries if not entry["size"]])
    skip = len(prefix)
    files = [
        FileInfo(entry["path"][skip:], entry["size"], _etag(entry))
        for entry in entries
        if len(entry["path"]) > skip and entry["path"] not in marks
    ]
    return files, [path[skip:].split("/")[0] for path in marks if len(path) > skip]


async def _list_below(store: Any, prefix: str, page: int) -> Found:
    """What lies below a prefix, and the prefixes below it that are still to be listed."""
    entries: list[Entry] = []
    async for more in store.list(prefix or None, chunk_size=page):
        entries += more
        if len(entries) == page and any("/" in entry["path"][len(prefix) :] for entry in more):
            below = await store.list_with_delimiter_async(prefix or None)
            deeper = [f"{one.rstrip('/')}/" for one in below["common_prefixes"]]
            return list(below["objects"]), deeper
    return entries, []


def _folder_marks(store: Any, empty: list[str]) -> set[str]:
    """Which empty objects are no files: one whose key ends in "/" marks a folder.

    obstore leaves the "/" out, so these and empty files without an extension look the same.
    """
    suspects = {path for path in empty if "." not in path.rsplit("/", 1)[-1]}
    found: set[str] = set()
    for above in {path.rpartition("/")[0] for path in suspects}:
        below = store.list_with_delimiter(above or None)["common_prefixes"]
        found |= suspects & {prefix.rstrip("/") for prefix in below}
    return found


def _etag(meta: Entry) -> str:
    return (meta["e_tag"] or "").strip('"')
