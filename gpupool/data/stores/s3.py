"""Buckets through obstore, with the keys, endpoint and region that botocore finds. Runs anywhere.

obstore costs a tenth of the CPU time of s3fs. It knows neither profiles nor what a user changes
later, so botocore is asked for the settings, and asked again when they change.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpupool.core.errors import DataError
from gpupool.data.stores.s3_keys import Keys
from gpupool.data.stores.s3_options import S3Options, read_options

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3CredentialProvider

# Changing one of them changes what a bucket's connection would be.
_VARIABLES = (
    b"AWS_ACCESS_KEY_ID",
    b"AWS_SECRET_ACCESS_KEY",
    b"AWS_SESSION_TOKEN",
    b"AWS_CREDENTIAL_EXPIRATION",
    b"AWS_PROFILE",
    b"AWS_DEFAULT_PROFILE",
    b"AWS_ENDPOINT_URL",
    b"AWS_ENDPOINT_URL_S3",
    b"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    b"AWS_DEFAULT_REGION",
    b"AWS_REGION",
    b"AWS_CONFIG_FILE",
    b"AWS_SHARED_CREDENTIALS_FILE",
    b"AWS_ROLE_ARN",
    b"AWS_WEB_IDENTITY_TOKEN_FILE",
    b"AWS_CONTAINER_CREDENTIALS_FULL_URI",
    b"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    b"AWS_CONTAINER_AUTHORIZATION_TOKEN",
    b"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    b"AWS_CA_BUNDLE",
)
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 15.0  # without a single byte
_FORKED = (
    "obstore, which reads S3, was used before this process was forked and would hang here; "
    'use DataLoader(..., multiprocessing_context="forkserver") or num_workers=0'
)
_WHOLE_TIMEOUT = timedelta(hours=1)  # obstore's own default of 30 s would cut large files


@dataclass(frozen=True)
class Settings:
    """Where a bucket is and how it is spoken to; no credentials."""

    endpoint: str
    region: str
    virtual: bool  # whether the bucket's name is part of the host's
    ca_file: str | None = None
    verify: bool = True


@dataclass(frozen=True)
class Connection:
    """An obstore store, the keys it signs with (None: it does not), and what it was made from."""

    store: Any = field(repr=False)
    keys: Keys | None
    settings: Settings
    made_from: tuple[object, ...] = field(repr=False)


class Bucket:
    """One bucket with the settings of the moment; any thread may call it."""

    def __init__(self, name: str, options: S3Options) -> None:
        self.name = name
        self.options = options
        self._region: str | None = None  # where the store said that it is
        self._lock = threading.Lock()
        self._live: Connection | None = None

    @property
    def expires_at(self) -> float | None:
        """When the keys in use end, in seconds since 1970, if that is known."""
        live = self._live
        return live.keys.expires_at if live is not None and live.keys is not None else None

    @property
    def address(self) -> str:
        """Where it was last asked: its endpoint; "" before."""
        live = self._live
        return live.settings.endpoint if live is not None else ""

    def connection(self) -> Connection:
        """The connection, recreated where AWS_* variables have changed. Asks no store.

        Raises what botocore raises without credentials, DataError in a forked process.
        """
        check_process()
        live = self._live
        if live is None or live.made_from != _state():
            live = self.renew(live)
        return live

    def renew(self, refused: Connection | None, region: str | None = None) -> Connection:
        """Another connection than `refused`, with what the credential chain gives now."""
        with self._lock:
            live = self._live
            if live is None or live is refused or live.made_from != _state():
                self._region = region or self._region
                live = self._connect()
                if live.keys is not None:
                    live.keys()  # what is wrong with them shows here, not in obstore
                self._live = live
        return live

    def _connect(self) -> Connection:
        from botocore.session import Session

        made_from = _state()
        options = self.options
        session = Session(profile=options.profile)
        settings = resolve(session, self.name, options, self._region)
        keys = None if options.anonymous else Keys(lambda: _credentials(session, options))
        return Connection(_store(self.name, settings, keys, options), keys, settings, made_from)


_buckets: weakref.WeakValueDictionary[tuple[str, S3Options], Bucket] = weakref.WeakValueDictionary()
_buckets_lock = threading.Lock()
_generation = 0
_used_by: int | None = None  # the process whose threads obstore's runtime has


def bucket(name: str, options: S3Options) -> Bucket:
    """The bucket of this name; the same one, with its connections, for the same options."""
    with _buckets_lock:
        found = _buckets.get((name, options))
        if found is None:
            found = _buckets[name, options] = Bucket(name, options)
        return found


def plain_options(options: Mapping[str, Any]) -> S3Options | None:
    """`options`, and those that fsspec's configuration adds; None if only s3fs understands them.

    None also where the environment asks for endpoints that only botocore can name.
    """
    from fsspec.config import conf

    if any(
        os.environ.get(name, "").lower() == "true"
        for name in ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT")
    ):
        return None
    return read_options({**conf.get("s3", {}), **options})


def forget_connections() -> None:
    """Have every bucket reconnect, with the current settings.

    Raises what botocore raises where a profile is not there.
    """
    global _generation
    _generation += 1
    with _buckets_lock:
        used = [bucket for bucket in _buckets.values() if bucket._live is not None]
    for one in used:
        one._connect()


def check_process() -> None:
    """Raise DataError in a process that was forked after obstore was used: it would hang."""
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    elif _used_by != os.getpid():
        raise DataError(_FORKED, "forked")


def resolve(session: Any, name: str, options: S3Options, region: str | None) -> Settings:
    """Where botocore would find a bucket, from options, environment and configuration files."""
    from botocore.configprovider import ConfiguredEndpointProvider

    profile = session.get_scoped_config()
    provider = ConfiguredEndpointProvider(session.full_config, profile, "s3")
    ignores = session.get_config_variable("ignore_configured_endpoint_urls")
    endpoint = options.endpoint or (None if ignores else provider.provide())
    region = region or options.region or session.get_config_variable("region")
    region = region or os.environ.get("AWS_REGION") or "us-east-1"
    addressing = options.addressing or (profile.get("s3") or {}).get("addressing_style")
    virtual = addressing == "virtual" if endpoint else addressing != "path" and "." not in name
    if endpoint is None:
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        endpoint = f"https://s3.{region}.{suffix}"
    endpoint = endpoint.rstrip("/")
    if not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w.~/-]*)?", endpoint):
        raise ValueError(f"Invalid endpoint: {endpoint}")  # as botocore says; obstore would panic
    if virtual:
        endpoint = endpoint.replace("://", f"://{name}.", 1)
    ca_file = options.verify if isinstance(options.verify, str) else None
    ca_file = ca_file or session.get_config_variable("ca_bundle")
    return Settings(endpoint, region, virtual, ca_file, options.verify is not False)


def _credentials(session: Any, options: S3Options) -> Any:
    from botocore.credentials import Credentials

    if options.key:
        return Credentials(options.key, options.secret, options.token)
    return session.get_credentials()


def _store(name: str, settings: Settings, keys: Keys | None, options: S3Options) -> Any:
    from obstore.store import S3Store

    client: ClientConfig = {
        "allow_http": settings.endpoint.startswith("http://"),
        "allow_invalid_certificates": not settings.verify,
        "connect_timeout": timedelta(seconds=options.connect_timeout_s or _CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=options.read_timeout_s or _READ_TIMEOUT_S),
        "timeout": _WHOLE_TIMEOUT,
    }
    if settings.ca_file:
        client["root_certificate"] = _certificates(settings.ca_file)
    return S3Store(
        name,
        # all of what obstore would otherwise take from the environment by rules of its own
        config={
            "endpoint": settings.endpoint,
            "aws_endpoint_url_s3": settings.endpoint,
            "region": settings.region,
            "virtual_hosted_style_request": settings.virtual,
            "skip_signature": keys is None,
            "request_payer": options.requester_pays,
        },
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},  # retry.py does, and counts
        credential_provider=cast("S3CredentialProvider | None", keys),
    )


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:  # no object's fault
        raise DataError(
            f"the file with certificates {path} cannot be read ({error.strerror}); check "
            "AWS_CA_BUNDLE, ca_bundle in the AWS profile, or the option verify=",
            "certificates",
        ) from None


def environment() -> tuple[bytes | None, ...]:
    """The variables that settings come from, as they are stored: every read looks at them.

    1 microsecond; to ask `os.environ` for each takes 20.
    """
    get = os.environ._data.get  # type: ignore[attr-defined]
    return tuple([get(name) for name in _VARIABLES])


def _state() -> tuple[object, ...]:
    """What a connection is made from."""
    return _generation, environment()
