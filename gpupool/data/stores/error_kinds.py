"""What kind of fault an error of a store is, whatever library raised it: pure. Runs anywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from gpupool.data.stores.retry import Budget, persist

T = TypeVar("T")
Kind = Literal[
    "missing",
    "ended",
    "refused",
    "denied",
    "no key",
    "clock",
    "unreachable",
    "busy",
    "no listing",
    "other",
]

# What S3 answers to a wrong or expired key, as opposed to a good one that may not read this.
_BAD_KEY_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
# Keys that were good until now: newer ones may be under way.
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_CLOCK_CODES = {"RequestTimeTooSkewed"}
_DENIED_CODES = {"AccessDenied", "AllAccessDisabled", "401", "403"}
_NOT_FOUND_CODES = {"NoSuchBucket", "NoSuchKey", "404"}
_ENDED_CODES = {"InvalidRange", "416"}
_BUSY_CODES = {
    "InternalError",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "429",
    "500",
    "502",
    "503",
    "504",
}
# By name: these libraries are there only when something else needs them.
_NO_KEY_ERRORS = {
    "NoCredentialsError",
    "NoKeysFileError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "SSOError",
    "TokenRetrievalError",
}
_UNREACHABLE_ERRORS = {
    "ClientConnectorError",
    "ConnectTimeoutError",
    "ConnectionRefusedError",
    "EndpointConnectionError",
    "gaierror",
}
_BREAKS = {
    "BrokenPipeError": "connection broken",
    "ClientPayloadError": "cut short",
    "ConnectionClosedError": "connection closed",
    "ConnectionResetError": "connection reset",
    "CutShortError": "cut short",
    "FSTimeoutError": "no answer",
    "IncompleteReadError": "cut short",
    "ReadTimeoutError": "no answer",
    "ResponseStreamingError": "cut short",
    "ServerDisconnectedError": "connection closed",
    "ServerTimeoutError": "no answer",
    "TimeoutError": "no answer",
}
# What obstore has no types for, but words: those of Rust's libraries.
_WORDS: tuple[tuple[str, Kind, str], ...] = (
    ("invalid list response", "no listing", "no whole listing"),
    ("kind: connect,", "unreachable", "no connection"),
    ("kind: timeout,", "busy", "no answer"),
    ("timedout", "busy", "no answer"),
    ("connectionreset", "busy", "connection reset"),
    ("incompletemessage", "busy", "connection closed"),
    ("incompletebody", "busy", "cut short"),
    ("unexpectedeof", "busy", "cut short"),
    ("kind: decode,", "busy", "cut short"),
    ("kind: body,", "busy", "cut short"),
    ("kind: interrupted,", "busy", "connection broken"),
    ("kind: request,", "busy", "connection broken"),
)
# S3 says so of a bucket that is elsewhere.
_REGION = re.compile(
    r"<Region>([a-z0-9-]+)</Region>"
    r"|<Endpoint>[^<]*\bs3[.-]([a-z]{2}-[a-z-]+-\d)\.amazonaws[^<]*</Endpoint>"
)
_PATIENT = Budget(seconds=120.0)
_EXPIRED = Budget(seconds=20.0)  # a renewal takes seconds
_BRIEF = Budget(tries=6, seconds=10.0)  # what may be a wrong address is reported soon
_served: set[str] = set()  # the addresses of stores that this process has had something from


class CutShortError(OSError):
    """A store sent fewer bytes than it had announced."""

    def __init__(self, num_bytes: int, announced: int) -> None:
        super().__init__(f"{num_bytes:,} of {announced:,} bytes came")


class KeysEndedError(Exception):
    """The keys at hand have expired, at `ended`, and the credential chain has no newer ones."""

    def __init__(self, ended: datetime) -> None:
        super().__init__(f"expired at {ended}")
        self.ended = ended


class NoKeysFileError(Exception):
    """The credential chain reports a file that cannot be read."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What kind of fault it is, and in a few words what: "503 SlowDown", "cut short".

    `region` is where the store says that the bucket is, if that was the fault.
    """

    kind: Kind
    what: str = ""
    region: str | None = None

    @property
    def is_refusal(self) -> bool:
        """Whether other credentials may help."""
        return self.kind in ("refused", "denied")

    @property
    def is_answer(self) -> bool:
        """Whether a store has said so; anything may break a connection, also a wrong address."""
        return self.kind != "unreachable" and (self.kind != "busy" or self.what[:1].isdigit())


def persisted(operation: Callable[[], T], address: Callable[[], str], doing: str = "reading") -> T:
    """What `operation` gives, tried again while its errors may pass; see `retry.persist`.

    `address` says which store is asked: one that this process has had something from is waited for.
    """

    def ask() -> T:
        answer = operation()
        _served.add(address())
        return answer

    def look(error: Exception) -> tuple[str, Budget] | None:
        if trouble(error).kind == "refused" and doing == "listing":
            return None  # somebody sits there who can bring newer keys
        return passes(error, address() in _served)

    return persist(ask, look, doing)


def passes(error: BaseException, is_known: bool) -> tuple[str, Budget] | None:
    """Why, and how long, to try again after an error; None where that cannot help.

    `is_known`: the store has given something before. AWS_MAX_ATTEMPTS bounds the tries, as it does
    for botocore.
    """
    found = trouble(error)
    what = found.what.split()[-1:]
    if found.kind == "busy" or (found.kind == "unreachable" and is_known):
        budget = _PATIENT
    elif found.kind in ("unreachable", "no listing"):
        budget = _BRIEF
    elif found.kind == "refused" and is_known and _EXPIRED_CODES.intersection(what):
        budget = _EXPIRED
    else:
        return None
    if not (is_known or found.is_answer or found.what == "no answer"):
        budget = _BRIEF
    limit = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return found.what, budget.within(max(1, int(limit))) if limit.isdecimal() else budget


def trouble(error: BaseException) -> Trouble:
    """What kind of fault an error of a store is."""
    chain = list(_chain(error))
    kinds = {base.__name__ for link in chain for base in type(link).__mro__}
    status, code = next((found for found in map(_answer, chain) if any(found)), ("", ""))
    text = str(error)
    region = _REGION.search(text)
    if kinds & _NO_KEY_ERRORS:
        return Trouble("no key")
    if region:
        return Trouble("other", code, region[1] or region[2])
    for known, kind in _CODES:
        if code in known or (not code and status in known):
            return Trouble(kind, f"{status} {code}".strip())
    if "FileNotFoundError" in kinds or "NotADirectoryError" in kinds:
        return Trouble("missing")
    if isinstance(error, KeyError) and "no item named" in text:  # a zip, of older fsspec
        return Trouble("missing")
    if status in ("401", "403"):
        return Trouble("denied", f"{status} {code}".strip())
    if status[:1] == "5":
        return Trouble("busy", f"{status} {code}".strip())
    if kinds & _UNREACHABLE_ERRORS:
        return Trouble("unreachable", "no connection")
    broken = next((_BREAKS[name] for name in sorted(kinds & set(_BREAKS))), None)
    if broken:
        return Trouble("busy", broken)
    if "BaseError" in kinds:  # obstore's
        words = text.lower()
        for word, kind, what in _WORDS:
            if word in words:
                return Trouble(kind, what)
    return Trouble("other", code)


_CODES: tuple[tuple[set[str], Kind], ...] = (
    (_CLOCK_CODES, "clock"),
    (_BAD_KEY_CODES, "refused"),
    (_DENIED_CODES, "denied"),
    (_NOT_FOUND_CODES, "missing"),
    (_ENDED_CODES, "ended"),
    (_BUSY_CODES, "busy"),
)


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
    if type(error).__module__.startswith("obstore") or isinstance(error, FileNotFoundError):
        status = re.search(r"status(?: code)?:? (\d{3})", str(error))
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        return status[1] if status else "", code[1] if code else ""
    return "", ""
