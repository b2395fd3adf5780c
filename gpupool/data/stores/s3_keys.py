"""The keys that S3 requests are signed with, as botocore has them at the moment. Runs anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gpupool.core.botocore_logs import quiet_botocore
from gpupool.data.stores.error_kinds import KeysEndedError, NoKeysFileError

_RENEW_AHEAD_S = 15 * 60.0  # as botocore does
_LAST_MOMENT_S = 2.0


class Keys:
    """What obstore asks for the keys to sign with: those that botocore has at the moment.

    `expires_at` is when they end in seconds since 1970, if that is known; `failure` why there are
    none now. Any thread may call it.
    """

    def __init__(self, load: Callable[[], Any], clock: Callable[[], float] = time.time) -> None:
        self._load = load  # gives botocore's credentials, or None
        self._clock = clock
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._frozen: Any = None
        self._ask_at = 0.0
        self.expires_at: float | None = None
        self.failure: Exception | None = None

    def __call__(self) -> dict[str, Any]:
        """obstore's `S3Credential`. Raises what botocore raises."""
        with self._lock, quiet_botocore():
            if self._clock() >= self._ask_at:
                self._ask()
            expires = self.expires_at and datetime.fromtimestamp(self.expires_at, UTC)
            return {
                "access_key_id": self._frozen.access_key,
                "secret_access_key": self._frozen.secret_key,
                "token": self._frozen.token,
                "expires_at": expires or None,
            }

    def __repr__(self) -> str:
        return "Keys(...)"

    def _ask(self) -> None:
        try:
            frozen, expires = self._loaded()
        except Exception as error:
            if self.expires_at is None or self._clock() >= self.expires_at - _LAST_MOMENT_S:
                self.failure = self._told(error)
                raise self.failure from None
            # those at hand are still good; an error comes when they are not
            self._ask_at = ask_again_at(self._clock(), self.expires_at)
            return
        self._frozen, self.expires_at, self.failure = frozen, expires, None
        self._ask_at = ask_again_at(self._clock(), self.expires_at)

    def _told(self, error: Exception) -> Exception:
        """An error of botocore's; by name those that would be taken for something else."""
        expires = getattr(self._credentials, "_expiry_time", None)
        if isinstance(error, RuntimeError) and expires and expires.timestamp() <= self._clock():
            return KeysEndedError(expires)
        if isinstance(error, OSError):  # such as the token's of a web identity: no object's fault
            return NoKeysFileError(str(error))
        return error

    def _loaded(self) -> tuple[Any, float | None]:
        from botocore.exceptions import NoCredentialsError

        if self._credentials is None:
            self._credentials = self._load()
        if self._credentials is None:
            raise NoCredentialsError
        frozen = self._credentials.get_frozen_credentials()
        expires = getattr(self._credentials, "_expiry_time", None)  # it has no public name
        return frozen, expires.timestamp() if expires else None


def ask_again_at(now: float, expires_at: float | None) -> float:
    """When to ask for keys again that end at `expires_at`, in seconds since 1970.

    Early enough to have new ones in time; not again and again where they are short-lived.
    """
    if expires_at is None:
        return float("inf")
    left = expires_at - now
    return expires_at - _RENEW_AHEAD_S if left > _RENEW_AHEAD_S + 1 else now + max(0.5, left / 4)
