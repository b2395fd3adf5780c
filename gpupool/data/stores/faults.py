"""Every fault of a store becomes one sentence here, whatever library raised it. Runs anywhere."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

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

T = TypeVar("T")
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
    "no key": "no access key was found ({}).",
    "expired": "the access key has expired ({}).",
    "refused": "the store refused the access key ({}).",
    "denied": "this access key may not read here ({}). Allow it to list and read, or use another "
    "one.",
    "read only": "this access key may not write here ({}). Allow it to list, read, write and "
    "delete, or use another one.",
}
_DISK = {
    errno.EFBIG: "the file is larger than is allowed here (ulimit -f); raise the limit",
    errno.ENOSPC: "the disk is full; make room, or give another folder",
    errno.EDQUOT: "your quota of the disk is used up; make room, or give another folder",
    errno.EROFS: "the disk is read-only; give another folder",
    errno.EACCES: "you may not write there; give a folder of yours",
    errno.EPERM: "you may not write there; give a folder of yours",
    errno.EEXIST: "there is a file where the folder should be; give another folder",
    errno.ENOTDIR: "a part of the path is a file; give another folder",
}
_PATIENT_S = 120.0
_RENEWAL_S = 20.0  # of keys takes seconds
_BRIEF_S = 10.0  # what may be a wrong address is reported soon
_served: set[str] = set()  # the addresses of stores that this process has had something from


@dataclass(frozen=True, slots=True)
class Trouble:
    """What kind of fault it is, and in a few words what: "503 SlowDown", "cut short"."""

    kind: str
    what: str = ""

    @property
    def is_refusal(self) -> bool:
        """Whether other credentials may help."""
        return self.kind in ("expired", "refused", "denied")


def trouble(error: BaseException) -> Trouble:
    """What kind of fault an error of a store is."""
    chain = list(_chain(error))
    signs = {base.__name__ for link in chain for base in type(link).__mro__}
    status, code = next((found for found in map(_answer, chain) if any(found)), ("", ""))
    signs |= {code, status, "5xx" if status.startswith("5") else status}
    said = status if code == status else f"{status} {code}".strip()
    for (kind, words), known in _SIGNS.items():
        if signs & set(known.split()):
            return Trouble(kind, said or words)
    if isinstance(error, KeyError) and "no item named" in str(error):  # a zip, of older fsspec
        return Trouble("missing")
    if isinstance(error, RuntimeError) and "still expired" in str(error):  # botocore's
        return Trouble("no key")
    return Trouble("other", said)


def _passes(error: Exception, is_known: bool, doing: str) -> tuple[str, float] | None:
    """Why, and for how many seconds, to try again after an error; None where that cannot help.

    `is_known`: the store has given something before.
    """
    found = trouble(error)
    if found.kind == "expired" and is_known and doing != "listing":  # that somebody sits before
        return found.what, _RENEWAL_S
    if found.kind not in ("busy", "unreachable"):
        return None
    # Anything may break a connection, also a wrong address.
    is_there = is_known or found.what[:1].isdigit() or found.what == "no answer"
    return found.what, _PATIENT_S if is_there else _BRIEF_S


def persisted(
    operation: Callable[[], T],
    url: str,
    options: Mapping[str, Any],
    path: str = "",
    doing: str = "reading",
) -> T:
    """What `operation` gives, tried again while its errors may pass.

    Raises DataError: the one sentence that says what has failed, where, and what to do; without any
    secret. `url` and `options` are those of a folder, `path` the file below it, "" for the folder
    itself; `doing` says what fails.
    """
    with Tries(doing) as tries:
        while True:
            address = _address(url, options)
            try:
                answer = operation()
            except DataError:
                raise  # says it already
            except Exception as error:  # file systems raise whatever they like
                passing = _passes(error, address in _served, doing)
                if passing is None or not tries.again(*passing):
                    raise sentence(error, url, options, path, doing, tries) from None
            else:
                _served.add(address)
                return answer


def _address(url: str, options: Mapping[str, Any]) -> str:
    """Which store is meant: the URL as far as a bucket or host, and where variables put it."""
    options = options.get("client_kwargs") or options
    endpoint = options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL")
    return f"{endpoint} {'/'.join(url.split('/')[:3])}"


def sentence(
    error: Exception,
    url: str,
    options: Mapping[str, Any],
    path: str = "",
    doing: str = "reading",
    tries: Tries | None = None,
) -> DataError:
    """The one sentence on an error of a file system; see `persisted`."""
    name, found = shown_name(url, path), trouble(error)
    text = without_secrets(" ".join(str(error).split()), options, url)
    where = without_passwords(url)  # a key is refused for all files alike: all ranks say the same
    writes = doing in ("writing", "removing")
    kind = "read only" if found.kind == "denied" and writes else found.kind
    if writes and _errno(error) in _DISK:
        kind = "disk"
    elif kind == "missing" and url.startswith("s3") and not found.what and _errno(error):
        kind = "other"  # a file of this machine, as of a token: no object's fault
    if kind in _KEYS:
        about = name if found.kind == "denied" else where
        why = _KEYS[kind].format(found.what.split()[-1] if found.what else text)
        return CredentialsError(f"{about}: {why} {_advice(kind)}", kind, url=about)
    if kind == "missing" and not writes:
        if path and "NoSuchBucket" not in found.what:
            return MissingSampleError(f"{name} does not exist", name, "missing")
        return DataNotFoundError(nothing_at(where), "missing", url=where)
    if kind == "changed" and path:
        return changed(name, "it is shorter now")
    if kind == "disk":
        what = f"cannot be written: {_DISK[_errno(error)]}"
    elif kind == "missing":
        what = "there is no such bucket or folder; make it, or correct it"
    elif kind == "busy":
        long = f"{tries.failed} times in {tries.passed_s:.0f} s" if tries else "once"
        what = f"{doing} failed {long}, most recently with: {found.what}; try again later"
    elif kind == "unreachable":
        host = re.search(r"https?://[^/\"\s]+", without_secrets(str(error), options))
        what = (
            f"the store{f' at {host.group()}' if host else ''} does not answer; "
            "check the network and, for s3, AWS_ENDPOINT_URL"
        )
    else:
        kind, what = "other", f"{type(error).__name__}: {text}" if text else f"{error!r}"
    return DataError(f"{name}: {what}", kind, url=name)


def _errno(error: Exception) -> int:
    return getattr(error, "errno", None) or 0


def _advice(kind: str) -> str:
    # On a rank: the notebook may have a key, but the ranks get it only when they are sent it.
    if kind == "no key" and current.is_on_rank():
        return "`%gpupool env AWS_*` sends the notebook's key to every rank."
    return (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "then `%gpupool env AWS_*` sends them to every rank."
    )


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


def _secrets(options: Mapping[str, Any]) -> set[str]:
    """The values that are secret, at any depth."""
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _secrets(value)
        elif isinstance(value, (bytes, bytearray)):  # a customer's key (SSE-C)
            found |= secret_values({name: value.decode(errors="surrogateescape")})
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
