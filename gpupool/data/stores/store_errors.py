"""Every fault of a store becomes one sentence here, and only here. Runs anywhere; no torch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from gpupool.core import current
from gpupool.core.errors import (
    CredentialsError,
    DataError,
    DataNotFoundError,
    MissingSampleError,
    SampleError,
)
from gpupool.core.terminal import without_controls
from gpupool.core.urls import passwords, without_passwords
from gpupool.core.wire.environ import secret_values
from gpupool.core.wire.masking import Secrets, redact
from gpupool.data.stores.error_kinds import KeysEndedError, trouble
from gpupool.data.stores.retry import Tries

_SET_AWS_KEYS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "then `%gpupool env AWS_*` sends them to every rank."
)
# On a rank: the notebook may have a key, but the ranks get it only when they are sent it.
_SEND_AWS_KEYS = "`%gpupool env AWS_*` sends the notebook's key to every rank."


@contextmanager
def named(url: str) -> Iterator[None]:
    """What a file system raises inside, as one sentence about `url`."""
    try:
        yield
    except DataError:
        raise  # says it already
    except Exception as error:  # file systems raise whatever they like
        raise store_error(error, url, {}, "") from None


def store_error(
    error: BaseException,
    url: str,
    options: Mapping[str, Any],
    path: str,
    *,
    tries: Tries | None = None,
    expires_at: float | None = None,
    doing: str = "reading",
) -> DataError:
    """The one sentence for a fault of the store: what happened, where, what to do.

    Holds no value of a credential. `url` and `options` are those of a folder, `path` the file below
    it, "" for the folder itself; `tries` what was done before, `expires_at` when the credentials
    end, `doing` what has failed.
    """
    name, found = shown_name(url, path), trouble(error)
    text = without_secrets(" ".join(_in_short(error).split()), options, url)
    where = without_passwords(url)  # a key is refused for all files alike: all ranks say the same
    code = found.what.split()[-1] if found.what else ""
    if isinstance(error, KeysEndedError):
        return _key_error("expired", where, f"at {_shown(error.ended.timestamp())}")
    if found.kind == "no key":
        return _key_error("no key", where, text)
    if found.kind in ("refused", "denied"):
        about = where if found.kind == "refused" else name
        return _key_error(found.kind, about, f"{code}{_ended(expires_at)}")
    if found.kind == "missing":
        if path and code != "NoSuchBucket":
            return MissingSampleError(f"{name} does not exist", name, "missing")
        return DataNotFoundError(nothing_at(where), "missing", url=where)
    if found.kind == "ended" and path:
        return changed(name, "it is shorter now")
    if found.kind == "clock":
        return DataError(
            f"{where}: the clock of this machine is wrong{_by(error)}, so the store refuses what "
            f"it signs ({code}); set the clock, as by `timedatectl set-ntp true`",
            "clock",
            url=where,
        )
    if found.kind == "busy":
        long = f"{tries.failed} times in {tries.passed_s:.0f} s" if tries else "once"
        what = f"{doing} failed {long}, most recently with: {found.what}; try again later"
        return DataError(f"{name}: {what}", "busy", url=name)
    if found.kind == "unreachable":
        host = re.search(r"https?://[^/\"\s]+", without_secrets(str(error), options))
        what = (
            f"the store{f' at {host.group()}' if host else ''} does not answer; "
            "check the network and, for s3, AWS_ENDPOINT_URL"
        )
        return DataError(f"{name}: {what}", "unreachable", url=name)
    if found.kind == "no listing":
        what = (
            f"the store's answer is cut off, or no listing of S3 ({text}); check the "
            "endpoint (AWS_ENDPOINT_URL), or try again later"
        )
        return DataError(f"{name}: {what}", "no listing", url=name)
    what = f"{type(error).__name__}: {text}" if text else f"{error!r}"
    return DataError(f"{name}: {what}", "other", url=name)


def _key_error(kind: str, where: str, why: str) -> CredentialsError:
    sentence = {
        "expired": f"the access key expired {why}, and there is no newer one.",
        "no key": f"no access key was found ({why}).",
        "refused": f"the store refused the access key ({why}).",
        "denied": f"this access key may not read here ({why}). Allow it to list and read, or use "
        "another one.",
    }[kind]
    advice = _SEND_AWS_KEYS if kind == "no key" and current.is_on_rank() else _SET_AWS_KEYS
    return CredentialsError(f"{where}: {sentence} {advice}", kind, url=where)


def shown_name(url: str, path: str) -> str:
    """The printable URL of a file of a folder: what steers a terminal in it is escaped."""
    url, path = without_passwords(url), without_passwords(path)
    return without_controls(f"{url}{path}" if not path or url.endswith("/") else f"{url}/{path}")


def changed(name: str, how: str) -> SampleError:
    """The error for a file that is another one than was listed."""
    return SampleError(
        f"{name} has changed since it was listed ({how}); make the datastore again", name, "changed"
    )


def nothing_at(name: str) -> str:
    """The sentence for a folder without files."""
    return f"{name} does not exist or holds no files; check the URL"


def without_secrets(text: str, options: Mapping[str, Any], url: str = "") -> str:
    """`text` with the credentials in `options`, `url` and the environment blotted out."""
    secrets = Secrets(_secrets(options) | passwords(url) | secret_values(os.environ))
    return without_passwords(redact(text, secrets))


def _by(error: BaseException) -> str:
    """How wrong the clock is, if S3 has said what its own shows: " by 17 minutes"."""
    answer = re.search(r"<ServerTime>([^<]+)</ServerTime>", str(error))
    try:
        there = datetime.fromisoformat(answer[1] if answer else "")
    except ValueError:
        return ""
    return f" by {abs(datetime.now(UTC) - there).total_seconds() / 60:,.0f} minutes"


def _ended(expires_at: float | None) -> str:
    if expires_at is None:
        return ""
    verb = "it expired at" if expires_at <= time.time() else "it is good until"
    return f"; {verb} {_shown(expires_at)}"


def _shown(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _in_short(error: BaseException) -> str:
    """What an error says; of obstore's answers, which quote what was signed, the message alone."""
    text = str(error)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    if message:
        return message[1]
    return text.split("\n")[0][:500] if type(error).__module__.startswith("obstore") else text


def _secrets(options: Mapping[str, Any]) -> set[str]:
    """The values that are secret, at any depth."""
    texts = {
        # a customer's key (SSE-C) is bytes; masking knows how `repr` and base64 write those
        name: value if isinstance(value, str) else value.decode(errors="surrogateescape")
        for name, value in options.items()
        if isinstance(value, (str, bytes, bytearray))
    }
    found = secret_values(texts)
    inner = [_secrets(value) for value in options.values() if isinstance(value, Mapping)]
    return found.union(*inner)
