"""The notebook's AWS credentials for the ranks, and new ones before these expire. On the client.

The ranks compute meanwhile, one cell for ten hours perhaps. botocore reads the variables again when
less than 15 minutes are left, so boto3 and s3fs sessions on the ranks continue, if the new ones are
there by then.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpupool.core.errors import CredentialsError, GpuPoolError
from gpupool.core.formatting import shortened
from gpupool.core.wire.environ import AWS_KEY_NAMES
from gpupool.core.wire.masking import Secrets, redact
from gpupool.pool.notices import NoticeLines

_NAMES = (*AWS_KEY_NAMES, "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
_LEAD_S = 20 * 60  # before the 15 minutes at which botocore looks for new ones
_SLICE_S = 30.0  # a longer wait would not notice that the machine has slept


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    """What botocore gave: variables for the ranks; until when in seconds since 1970, if known."""

    variables: dict[str, str] = field(repr=False)  # not to be seen in a traceback
    expires_at: float = math.inf

    @property
    def missing(self) -> list[str]:
        """Variables of an earlier login, which would not go with these."""
        return [name for name in _NAMES if name not in self.variables]


class AwsChain:
    """botocore's chain (environment, profile, SSO, role, process), resolved as often as needed.

    The botocore session is kept, and with it the profile: another AWS_PROFILE that the notebook
    sets later is for a new chain. No error shows any of the `hidden` values.
    """

    def __init__(self, hidden: Secrets) -> None:
        from botocore.session import Session

        self._session, self._hidden = Session(), hidden

    def resolve(self) -> AwsCredentials:
        """The credentials of this moment. May ask AWS or run a program, and take seconds.

        Raises:
            CredentialsError: there are none, or they cannot be had.
        """
        try:
            return self._resolve()
        except Exception as error:  # profile missing, login ran out, program or network fails
            reason = shortened(redact(str(error), self._hidden), 300).rstrip(".")
            raise CredentialsError(
                f"AWS credentials: {reason}. Log in (`aws sso login`), name a profile "
                "(AWS_PROFILE), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; then "
                "`%gpupool env --aws`.",
                "no key",
            ) from None

    def _resolve(self) -> AwsCredentials:
        from botocore.credentials import create_credential_resolver
        from botocore.exceptions import NoCredentialsError

        session = self._session
        # A new resolver has an empty cache: it gives new credentials though the last ones are
        # still good, and sees a login or a file that another program has renewed.
        credentials = create_credential_resolver(session).load_credentials()
        if credentials is None:
            raise NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        if session.profile is not None and credentials.method != "env":
            session.set_config_variable("profile", session.profile)
        expires = getattr(credentials, "_expiry_time", None)  # botocore has no public name for it
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        found = {
            "AWS_ACCESS_KEY_ID": frozen.access_key,
            "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
            "AWS_SESSION_TOKEN": frozen.token,
            "AWS_CREDENTIAL_EXPIRATION": expires and expires.isoformat(),
            "AWS_DEFAULT_REGION": session.get_config_variable("region"),
            "AWS_ENDPOINT_URL": endpoint or session.get_scoped_config().get("endpoint_url"),
        }
        variables = {name: str(value) for name, value in found.items() if value}
        return AwsCredentials(variables, expires.timestamp() if expires else math.inf)


class Renewal:
    """Keeps the ranks of one pool in AWS credentials, in a thread.

    `send` takes new ones to the ranks and raises a GpuPoolError where that fails. The user is told
    once of each expiry that comes nearer without a renewal.
    """

    def __init__(
        self,
        chain: AwsChain,
        current: AwsCredentials,
        send: Callable[[Renewal, AwsCredentials], None],
    ) -> None:
        self._chain, self._send = chain, send
        self._closed = threading.Event()
        self._take(current)
        threading.Thread(target=self._run, name="gpupool-credentials", daemon=True).start()

    def close(self) -> None:
        """End; returns at once. What is being sent may still be."""
        self._closed.set()

    @property
    def sentence(self) -> str:
        """How things stand, for the status."""
        expires_at = self._current.expires_at
        if expires_at == math.inf:
            return "AWS credentials without a known end"
        until = f"AWS credentials until {time.strftime('%a %H:%M', time.localtime(expires_at))}"
        if self._num_failures < 2:  # the next try may do better, and is soon
            return f"{until}, renewed automatically"
        return f"{until}, could not be renewed. {self._reason}"

    def _take(self, fresh: AwsCredentials) -> None:
        self._current, self._num_failures, self._reason = fresh, 0, ""
        self._lead_s = min(_LEAD_S, max(0.0, fresh.expires_at - time.time()) / 2)
        self._due = fresh.expires_at - self._lead_s

    def _run(self) -> None:
        while not self._closed.wait(min(_SLICE_S, max(0.05, self._due - time.time()))):
            if time.time() >= self._due:
                self._renew()

    def _renew(self) -> None:
        self._due = time.time() + max(1.0, min(60.0, self._lead_s / 20))  # if it fails
        try:
            fresh = self._chain.resolve()
            if fresh.variables != self._current.variables:
                self._send(self, fresh)
                self._take(fresh)
            # a machine's role has new ones only near the end
            elif time.time() >= self._current.expires_at:
                raise CredentialsError("AWS credentials: they are still the same.")
        except GpuPoolError as error:
            self._num_failures += 1
            self._reason = str(error)
            if self._num_failures == 2 and not self._closed.is_set():
                NoticeLines()(self.sentence)
