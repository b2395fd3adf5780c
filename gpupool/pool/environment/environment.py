"""The environment variables that one pool's ranks were sent, and the values to hide for it.

Runs on the client. Variables go over the control channel, which the ranks answer while they
compute: `%gpupool env` works, and AWS credentials are renewed, in the middle of a training.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from pathlib import Path

from gpupool.core.errors import CredentialsError, OptionsError, PoolError
from gpupool.core.terminal import plain
from gpupool.core.wire import environ
from gpupool.core.wire.environ import AWS_KEY_NAMES
from gpupool.core.wire.masking import Secrets, redact
from gpupool.core.wire.requests import Answer, SetEnvironment
from gpupool.core.wire.values import Place
from gpupool.pool.engines.engines import Engines
from gpupool.pool.environment.credentials import AWS_NAMES, AwsChain, AwsCredentials, ChainError
from gpupool.pool.environment.renewal import Notify, Renewal

_TIMEOUT_S = 60.0
# A rank that has just come up may not hear the first time; then it is asked less and less often.
_SEND_AGAIN_S, _MOST_S = 0.2, 2.0
_numbers = itertools.count(1)  # of requests, over all pools of this process

_HOW_TO = (
    "Log in (`aws sso login`), name a profile (AWS_PROFILE), or set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY."
)


@dataclass
class _Remembered:
    """What this notebook has propagated, never values: its next pool gets it too."""

    names: set[str] = field(default_factory=set)
    aws: bool = False


_remembered = _Remembered()


def _notify(sentence: str) -> None:
    print(f"gpupool: {sentence}", file=sys.stderr)


def variables_at_start(asked_for: Iterable[str]) -> dict[str, str]:
    """What a new pool's ranks are sent: what must not be inherited, was propagated, is asked for.

    Raises:
        OptionsError: a name in `asked_for` is not set.
    """
    return {
        **environ.sent_after_start(os.environ),
        **environ.select(_remembered.names, os.environ, strict=False),
        **environ.select(asked_for, os.environ),
    }


def notebook_place() -> Place:
    """Where this notebook works: what a rank takes over."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # it was deleted; an engine stays where it is
        cwd = ""
    # reading it through os.umask would change it, for other threads too
    umask = next(
        int(line.split()[1], 8)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Umask:")
    )
    return Place([path for path in sys.path if path], cwd, umask)


class Environment:
    """What the ranks of one pool have been sent. Any thread may call it.

    `secrets` are the values to mask; it grows while the pool lives and never shrinks.
    `notify` is called, in a background thread, with a sentence that the user should see.
    """

    def __init__(self, engines: Engines, notify: Notify = _notify) -> None:
        self.secrets = Secrets()
        self._engines = engines
        self._notify = notify
        self._lock = threading.RLock()
        self._renewal: Renewal | None = None
        self._trouble = ""
        self._closed = False
        self._variables: dict[str, str] = {}

    @property
    def variables(self) -> dict[str, str]:
        """Name -> value of everything that the ranks were sent and that was not unset since."""
        # Without the lock: a status must not wait for a rank that is slow to take what is sent.
        return dict(self._variables)  # never changed, only replaced

    @property
    def fingerprints(self) -> dict[str, str]:
        """Name -> fingerprint of the value."""
        return {k: environ.fingerprint(v) for k, v in sorted(self.variables.items())}

    @property
    def credentials(self) -> str:
        """How the AWS credentials that `--aws` has sent stand; empty if it has sent none."""
        renewal = self._renewal
        return redact(renewal.sentence if renewal else self._trouble, self.secrets)

    def start(self, variables: Mapping[str, str]) -> None:
        """Send `variables_at_start`, and `--aws` again if an earlier pool was given it."""
        self.set(variables)
        if _remembered.aws:
            try:
                self._send_aws()
            except CredentialsError as error:  # no reason to be without a pool
                self._trouble = f"{error} Then `%gpupool env --aws`."
                self._notify(self.credentials)

    def propagate(self, names_or_globs: Sequence[str], aws: bool) -> dict[str, str]:
        """Send variables of the notebook, and its AWS credentials; remember both.

        Returns:
            Name -> fingerprint.

        Raises:
            OptionsError: a name is not set, or a glob matches nothing.
        """
        variables = environ.select(names_or_globs, os.environ)
        for glob in names_or_globs:
            if not environ.select([glob], os.environ):
                raise OptionsError(
                    f"no variable of the notebook's environment matches {plain(glob)}."
                )
        with self._lock:
            self.set(variables)
            if aws:
                variables |= self._send_aws()
                _remembered.aws = True
            elif "AWS_ACCESS_KEY_ID" in variables:  # the user's choice instead of the chain's
                self._forget_aws()
            _remembered.names.update(environ.select(names_or_globs, os.environ))
        return {name: environ.fingerprint(value) for name, value in variables.items()}

    def unset(self, names_or_globs: Sequence[str]) -> list[str]:
        """Remove variables that were sent from the ranks, and forget them; returns their names."""
        with self._lock:
            names = list(environ.select(names_or_globs, self._variables, strict=False))
            if "AWS_ACCESS_KEY_ID" in names:
                self._forget_aws()
            self.set({}, unset=names)
            _remembered.names.difference_update(names)
        return names

    def set(
        self, variables: Mapping[str, str], unset: Sequence[str] = (), *, refresh: bool = True
    ) -> None:
        """Set and remove variables on every rank, busy or not; returns when all have done so.

        Args:
            refresh: also have open file systems take the new credentials.

        Raises:
            PoolError: a rank does not answer, or its file systems do not take the credentials.
        """
        if not variables and not unset:
            return
        with self._lock:
            # First, so that whatever goes wrong on a rank is masked already.
            self.secrets.add(environ.secret_values(variables))
            both = {**self._variables, **variables}
            self._variables = {k: v for k, v in both.items() if k not in unset}
            self._send(self._engines.alive_ranks(), variables, unset, refresh)

    def bring(self, ranks: Iterable[int]) -> None:
        """Bring ranks that have just come up to where the others are.

        Raises:
            PoolError: as above.
        """
        with self._lock:
            if self._variables:
                self._send(ranks, self._variables, unset=(), refresh=False)

    def close(self) -> None:
        """End the renewal, with the pool."""
        self._closed = True
        if self._renewal is not None:
            self._renewal.close()

    # ---- inside --------------------------------------------------------------------------

    def _send_aws(self) -> dict[str, str]:
        chain = AwsChain()
        try:
            current = chain.resolve()
        except ChainError as error:
            reason = redact(str(error), self.secrets)
            raise CredentialsError(f"AWS credentials: {reason}. {_HOW_TO}", "no key") from None
        with self._lock:
            self._end_renewal()
            # Else a rank would mix the new key with the token or the region of an earlier login.
            missing = [name for name in AWS_NAMES if name not in current.variables]
            self.set(current.variables, unset=missing)
            self._renewal = Renewal(chain, current, self._renew, self._notify)
            if self._closed:  # the pool has stopped while the chain was asked
                self._renewal.close()
        return current.variables

    def _renew(self, fresh: AwsCredentials) -> None:
        """Called by the renewal's thread. The ranks' botocore finds the new variables itself."""
        with self._lock:
            if self._renewal is None or self._renewal.closed():
                return
            missing = [name for name in AWS_KEY_NAMES if name not in fresh.keys]
            self.set(fresh.keys, unset=missing, refresh=fresh.expires_at is None)

    def _end_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.close()
        self._renewal, self._trouble = None, ""

    def _forget_aws(self) -> None:
        self._end_renewal()
        _remembered.aws = False

    def _send(
        self,
        ranks: Iterable[int],
        variables: Mapping[str, str],
        unset: Sequence[str],
        refresh: bool,
    ) -> None:
        """Have each of these ranks that lives take it; asked again until each has answered."""
        request = SetEnvironment(dict(variables), list(unset), refresh, next(_numbers))
        deadline, wait_s = time.monotonic() + _TIMEOUT_S, _SEND_AGAIN_S
        asked: dict[Future[Answer[None]], int] = {}
        missing = set(ranks)  # one that is replaced meanwhile gets all variables from `bring`
        while missing and time.monotonic() < deadline and not self._closed:
            futures = self._engines.control(request, sorted(missing))
            asked.update({future: rank for rank, future in futures.items()})
            wait_futures(futures.values(), wait_s) if futures else time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_S)
            for future in [future for future in asked if future.done()]:
                rank, answer = asked.pop(future), future.result()
                if answer.status != "died":  # else it may be there again by now
                    missing.discard(rank)
                    self._check(rank, answer)
            missing &= set(self._engines.alive_ranks())
        if missing:
            listed = ", ".join(map(str, sorted(missing)))
            raise PoolError(
                f"rank {listed} did not take the environment variables within {_TIMEOUT_S:.0f} s: "
                "stopped, or in code that does not return to Python.",
                ranks=sorted(missing),
            )

    def _check(self, rank: int, answer: Answer[None]) -> None:
        if answer.error:
            text = redact(answer.error, self.secrets)
            raise PoolError(f"rank {rank} has the new variables, but: {text}", ranks=[rank])
