"""The environment variables that one pool's ranks were sent, AWS credentials among them.

Runs on the client. Variables go over the control channel, which the ranks answer while they
compute: `%gpupool env` works, and credentials are renewed, in the middle of a training. botocore
reads the variables again when less than 15 minutes are left, so boto3 and s3fs sessions on the
ranks continue, if the new ones are there by then.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from pathlib import Path

from gpupool.core.errors import CredentialsError, GpuPoolError, PoolError
from gpupool.core.formatting import shortened
from gpupool.core.wire import environ
from gpupool.core.wire.masking import Secrets, redact
from gpupool.core.wire.requests import Answer, SetEnvironment
from gpupool.core.wire.values import Place
from gpupool.pool.engines.engines import Engines
from gpupool.pool.notices import NoticeLines

_TIMEOUT_S = 60.0
_SEND_AGAIN_S = 0.2  # a rank that has just come up may not hear the first time
_AWS = "--aws"
_AWS_NAMES = (*environ.AWS_KEY_NAMES, "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
_LEAD_S = 20 * 60  # before the 15 minutes at which botocore looks for new ones
_SLICE_S = 30.0  # a longer wait would not notice that the machine has slept
_remembered: set[str] = set()  # names that were propagated, or _AWS: the next pool gets them too


def variables_at_start(asked_for: Iterable[str]) -> dict[str, str]:
    """What a new pool's ranks are sent: what must not be inherited, was propagated, is asked for.

    An OptionsError if a name of these is not set.
    """
    return {
        **environ.sent_after_start(os.environ),
        **environ.select(_remembered, os.environ, strict=False),
        **environ.select(asked_for, os.environ),
    }


def notebook_place() -> Place:
    """Where this notebook works: what a rank takes over."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # it was deleted; an engine stays where it is
        cwd = ""
    # reading it through os.umask would change it, for other threads too
    umask = re.findall(r"(?m)^Umask:\s*(\d+)", Path("/proc/self/status").read_text())[0]
    return Place([path for path in sys.path if path], cwd, int(umask, 8))


class Environment:
    """What the ranks of one pool have been sent. Any thread may call it.

    `secrets` are the values to mask; it grows while the pool lives and never shrinks.
    """

    def __init__(self, engines: Engines) -> None:
        self.secrets: Secrets = engines.secrets
        self._engines = engines
        self._lock = threading.RLock()
        self._renewal: Renewal | None = None
        self._closed = False
        self._variables: dict[str, str] = {}  # never changed, only replaced

    @property
    def fingerprints(self) -> dict[str, str]:
        """Name -> fingerprint of the value, of all that the ranks were sent and still have."""
        # Without the lock: a status must not wait for a rank that is slow to take what is sent.
        return {k: environ.fingerprint(v) for k, v in sorted(self._variables.items())}

    @property
    def credentials(self) -> str:
        """How the AWS credentials that `--aws` has sent stand; empty if it has sent none."""
        renewal = self._renewal
        return renewal.sentence if renewal else ""

    def start(self, variables: Mapping[str, str]) -> None:
        """Send `variables_at_start`, and `--aws` again if an earlier pool was given it."""
        self.set(variables, refresh=False)
        if _AWS in _remembered:
            try:
                self._send_aws()
            except CredentialsError as error:  # no reason to be without a pool
                NoticeLines()(str(error))

    def propagate(self, names_or_globs: Sequence[str], aws: bool) -> dict[str, str]:
        """As `Pool.propagate_env`. An OptionsError if a name is not set or a glob finds nothing."""
        variables = environ.select(names_or_globs, os.environ)
        with self._lock:
            self.set(variables)
            _remembered.update(variables)
            if aws:
                variables |= self._send_aws()
            elif "AWS_ACCESS_KEY_ID" in variables:  # the user's choice instead of the chain's
                self._forget_aws()
        return {name: environ.fingerprint(value) for name, value in variables.items()}

    def unset(self, names_or_globs: Sequence[str]) -> list[str]:
        """Remove variables that were sent from the ranks, and forget them; returns their names."""
        with self._lock:
            names = list(environ.select(names_or_globs, self._variables, strict=False))
            if "AWS_ACCESS_KEY_ID" in names:
                self._forget_aws()
            self.set({}, names)
            _remembered.difference_update(names)
        return names

    def set(
        self, variables: Mapping[str, str], unset: Sequence[str] = (), *, refresh: bool = True
    ) -> None:
        """Set and remove variables on every rank, busy or not; returns when all have done so.

        With `refresh` open file systems take the new credentials. A PoolError if a rank does not
        answer, or its file systems do not take them.
        """
        with self._lock:
            # First, so that whatever goes wrong on a rank is masked already.
            self.secrets.add(environ.secret_values(variables))
            both = {**self._variables, **variables}
            self._variables = {k: v for k, v in both.items() if k not in unset}
            request = SetEnvironment(dict(variables), list(unset), refresh)
            self._send(self._engines.alive_ranks(), request)

    def bring(self, ranks: Iterable[int]) -> None:
        """Bring ranks that have just come up to where the others are; raises as `set`."""
        with self._lock:
            self._send(ranks, SetEnvironment(self._variables, [], refresh=False))

    def close(self) -> None:
        self._closed = True
        if self._renewal is not None:
            self._renewal.close()

    # ---- inside --------------------------------------------------------------------------

    def _send_aws(self) -> dict[str, str]:
        chain = AwsChain(self.secrets)
        current = chain.resolve()
        with self._lock:
            self._forget_aws()
            _remembered.add(_AWS)
            self.set(current.variables, current.missing)
            if not self._closed:  # the pool may have stopped while the chain was asked
                self._renewal = Renewal(chain, current, self._renew)
        return current.variables

    def _renew(self, renewal: Renewal, fresh: AwsCredentials) -> None:
        """Called by the renewal's thread. The ranks' botocore finds the new variables itself."""
        with self._lock:
            if renewal is self._renewal:
                self.set(fresh.variables, fresh.missing, refresh=fresh.expires_at == math.inf)

    def _forget_aws(self) -> None:
        if self._renewal is not None:
            self._renewal.close()
        self._renewal = None
        _remembered.discard(_AWS)

    def _send(self, ranks: Iterable[int], request: SetEnvironment) -> None:
        """Have each of these ranks that lives take it; asked again until each has answered."""
        deadline = time.monotonic() + _TIMEOUT_S
        asked: dict[Future[Answer[None]], int] = {}
        # one that is replaced meanwhile gets all variables from `bring`
        missing = set(ranks) if request.variables or request.unset else set()
        while missing and time.monotonic() < deadline and not self._closed:
            futures = self._engines.control(request, sorted(missing))
            asked.update({future: rank for rank, future in futures.items()})
            wait_futures(futures.values(), _SEND_AGAIN_S) if futures else time.sleep(_SEND_AGAIN_S)
            for future in [future for future in asked if future.done()]:
                rank, answer = asked.pop(future), future.result()
                if answer.status != "died":  # else it may be there again by now
                    missing.discard(rank)
                if answer.error:
                    text = redact(answer.error, self.secrets)
                    raise PoolError(f"rank {rank} has the new variables, but: {text}", ranks=[rank])
            missing &= set(self._engines.alive_ranks())
            # Who has not heard it has just come up, and nothing to refresh; who has is at it.
            request = SetEnvironment(request.variables, request.unset, refresh=False)
        if missing:
            listed = ", ".join(map(str, sorted(missing)))
            raise PoolError(
                f"rank {listed} did not take the environment variables within {_TIMEOUT_S:.0f} s: "
                "stopped, or in code that does not return to Python.",
                ranks=sorted(missing),
            )


# ---- AWS credentials -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    """What botocore gave: variables for the ranks; until when in seconds since 1970, if known."""

    variables: dict[str, str] = field(repr=False)  # not to be seen in a traceback
    expires_at: float = math.inf

    @property
    def missing(self) -> list[str]:
        """Variables of an earlier login, which would not go with these."""
        return [name for name in _AWS_NAMES if name not in self.variables]


class AwsChain:
    """botocore's chain (environment, profile, SSO, role, process), resolved as often as needed.

    The botocore session is kept, and with it the profile: another AWS_PROFILE that the notebook
    sets later is for a new chain. No error shows any of the `hidden` values.
    """

    def __init__(self, hidden: Secrets) -> None:
        from botocore.session import Session

        self._session, self._hidden = Session(), hidden

    def resolve(self) -> AwsCredentials:
        """The credentials of this moment; a CredentialsError says why there are none.

        May ask AWS or run a program, and take seconds.
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
