"""Every fault of a store becomes one sentence here, whatever library raised it. Runs anywhere."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
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
from gpupool.data.stores.retry import Tries

# The kind of fault, and a few words if no store has said any -> what shows it: codes of S3, HTTP's
# statuses, names of classes, whose libraries may not be there. The first that fits.
_SIGNS = {
    ("no key", ""): "NoCredentialsError PartialCredentialsError CredentialRetrievalError "
    "ProfileNotFound SSOError TokenRetrievalError",
    ("other", ""): "RequestTimeTooSkewed",  # by a wrong clock: no other key would help
    ("expired", ""): "ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired",
    ("refused", ""): "InvalidAccessKeyId InvalidToken SignatureDoesNotMatch",
    ("denied", ""): "AccessDenied AllAccessDisabled 401 403",
    ("missing", ""): "NoSuchBucket NoSuchKey 404 FileNotFoundError NotADirectoryError",
    ("changed", ""): "InvalidRange 416",
    ("busy", ""): "RequestTimeout SlowDown Throttling RequestLimitExceeded 429 5xx",
    ("unreachable", "no connection"): "ClientConnectorError ConnectTimeoutError "
    "ConnectionRefusedError EndpointConnectionError gaierror",
    ("busy", "no answer"): "FSTimeoutError ReadTimeoutError ServerTimeoutError TimeoutError",
    ("busy", "cut short"): "ClientPayloadError IncompleteRead IncompleteReadError "
    "ResponseParserError ResponseStreamingError",
    ("busy", "connection broken"): "BrokenPipeError ConnectionClosedError ConnectionResetError "
    "ServerDisconnectedError",
}
_KEYS = {
    "no key": "no access key was found",
    "expired": "the access key has expired",
    "refused": "the store refused the access key",
    "denied": "is not allowed with this access key",
}
_SEND = "`%gpupool env AWS_*` sends the notebook's key to every rank."
_PATIENT_S = 120.0
_BRIEF_S = 10.0  # what may be a wrong address is reported soon


def trouble(error: BaseException) -> tuple[str, str]:
    """What kind of fault it is, and in a few words what: "503 SlowDown", "cut short"."""
    chain = list(_chain(error))
    signs = {base.__name__ for link in chain for base in type(link).__mro__}
    status, code = next((found for found in map(_answer, chain) if any(found)), ("", ""))
    signs |= {code, status, "5xx" if status.startswith("5") else status}
    said = status if code == status else f"{status} {code}".strip()
    for (kind, words), known in _SIGNS.items():
        if signs & set(known.split()):
            return kind, said or words
    if "GenericError" in signs and not said:  # obstore's, of the network
        is_silence = re.search("kind: timeout|timedout", str(error).lower())
        return "network", "no answer" if is_silence else "connection broken"
    return "other", said


def passing(error: Exception, is_known: bool) -> tuple[str, float] | None:
    """Why, and for how many seconds, to try again after an error; None where that cannot help.

    `is_known`: the store has given something before.
    """
    kind, what = trouble(error)
    if kind not in ("busy", "unreachable"):
        return None
    # Anything may break a connection, also a wrong address.
    is_there = is_known or what[:1].isdigit() or what == "no answer"
    return what, _PATIENT_S if is_there else _BRIEF_S


def sentence(
    error: Exception,
    url: str,
    options: Mapping[str, Any],
    path: str,
    tries: Tries,
) -> DataError:
    """The one sentence that says what has failed, where, and what to do; without any secret.

    `url` and `options` are those of a folder, `path` the file below it, "" for the folder itself.
    """
    name, doing, (kind, what) = shown_name(url, path), tries.doing, trouble(error)
    text = without_secrets(" ".join(str(error).split()), options, url)
    where = without_passwords(url)  # a key is refused for all files alike: all ranks say the same
    number = 0 if what else getattr(error, "errno", None) or 0  # of this machine
    if number and doing in ("writing", "removing"):
        why = "there is a file where the folder should be"
        if number != errno.EEXIST:
            why = f"cannot be written ({os.strerror(number)})"
        return DataError(f"{name}: {why}; give another folder", "disk", url=name)
    if number and (kind == "denied" or (kind == "missing" and url.startswith("s3"))):
        kind = "other"  # as of a file with a token: no object's fault, and no key's
    if kind in _KEYS:
        about, said = (name, f"{doing} ") if kind == "denied" else (where, "")
        why = f"{said}{_KEYS[kind]} ({what.split()[-1] if what else text})"
        # The notebook may have a key, but the ranks get it only when they are sent it.
        is_there = kind == "no key" and current.is_on_rank()
        advice = "" if is_there else "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. "
        return CredentialsError(f"{about}: {why}. {advice}{_SEND}", kind, url=about)
    if kind == "missing" and path and doing == "reading" and "NoSuchBucket" not in what:
        return MissingSampleError(f"{name} does not exist", name, "missing")
    if kind == "missing":
        what = f"{where} does not exist or holds no files; check the URL"
        return DataNotFoundError(what, "missing", url=where)
    if kind == "changed" and path:
        return changed(name)
    if kind == "busy":
        long = f"{tries.failed} times in {tries.passed_s:.0f} s"
        what = f"{doing} failed {long}, most recently with: {what}; try again later"
    elif kind == "unreachable":
        what = f"the store does not answer ({text}); check the network, and AWS_ENDPOINT_URL for s3"
    else:
        kind, what = "other", f"{type(error).__name__}: {text}" if text else f"{error!r}"
    return DataError(f"{name}: {what}", kind, url=name)


def shown_name(url: str, path: str) -> str:
    """The printable URL of a file of a folder: what steers a terminal in it is escaped."""
    url, path = without_passwords(url), without_passwords(path)
    return without_controls(f"{url}{path}" if not path or url.endswith("/") else f"{url}/{path}")


def changed(name: str) -> SampleError:
    what = f"{name} has changed since it was listed; make the datastore again"
    return SampleError(what, name, "changed")


def without_secrets(text: str, options: Mapping[str, Any], url: str = "") -> str:
    """`text` with the credentials in `options`, `url` and the environment blotted out."""
    secrets = Secrets(_secrets(options) | passwords(url) | secret_values(os.environ))
    return without_passwords(redact(text, secrets))


def _secrets(options: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, (bytes, bytearray)):  # a customer's key (SSE-C)
            value = value.decode(errors="surrogateescape")
        if isinstance(value, Mapping):
            found |= _secrets(value)
        elif isinstance(value, str):
            found |= secret_values({name: value})
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors it was raised from: s3fs keeps S3's own answer there."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _answer(error: BaseException) -> tuple[str, str]:
    """The HTTP status and S3's code in what a store has answered, "" where there is none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
        return str(status), str(response.get("Error", {}).get("Code", ""))
    if isinstance(getattr(error, "status", None), int):  # aiohttp's
        return str(getattr(error, "status", "")), ""
    if type(error).__module__.startswith("obstore"):
        status = re.search(r"status(?: code)?:? (\d{3})", str(error))
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        return status[1] if status else "", code[1] if code else ""
    return "", ""
