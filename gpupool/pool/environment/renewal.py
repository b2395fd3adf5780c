"""New AWS credentials for the ranks before theirs expire. Runs on the client, in its own thread.

The ranks compute meanwhile, one cell for ten hours perhaps: what is sent goes over the control
channel. botocore reads the variables again when less than 15 minutes are left, so boto3 and s3fs
sessions on the ranks continue, if the new ones are there by then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from gpupool.core.errors import GpuPoolError
from gpupool.pool.environment.credentials import AwsChain, AwsCredentials, ChainError

_LEAD_S = 20 * 60  # before the 15 minutes at which botocore looks for new ones
_SLICE_S = 30.0  # a longer wait would not notice that the machine has slept

Send = Callable[[AwsCredentials], None]
Notify = Callable[[str], None]


def lead_s(lifetime_s: float) -> float:
    """How long before the end credentials are renewed that are good for `lifetime_s` from now.

    >>> lead_s(12 * 3600), lead_s(900)
    (1200, 450.0)
    """
    return min(_LEAD_S, max(0.0, lifetime_s) / 2)


def retry_s(lifetime_s: float) -> float:
    """How long to wait after a failed renewal of credentials that were good for `lifetime_s`.

    >>> retry_s(12 * 3600), retry_s(900), retry_s(10)
    (60.0, 22.5, 1.0)
    """
    return max(1.0, min(60.0, lead_s(lifetime_s) / 20))


class Renewal:
    """Keeps the ranks of one pool in AWS credentials; a thread while they have an expiry.

    `send` takes new ones to the ranks and raises a GpuPoolError where that fails. It is a method,
    held weakly: with its object the renewal ends. `notify` is called once for each expiry that
    comes nearer without a renewal. `clock` gives seconds since 1970.
    """

    def __init__(
        self,
        chain: AwsChain,
        current: AwsCredentials,
        send: Send,
        notify: Notify,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._chain = chain
        self._notify = notify
        self._clock = clock
        self._closed = threading.Event()
        self._send = weakref.WeakMethod(send, lambda _: self._closed.set())
        self._reason = ""
        self._num_failures = 0
        self._take(current)
        if current.expires_at is not None:
            threading.Thread(target=self._run, name="gpupool-credentials", daemon=True).start()

    def close(self) -> None:
        """End; returns at once. What is being sent may still be."""
        self._closed.set()

    def closed(self) -> bool:
        """Whether nothing more will be sent."""
        return self._closed.is_set()

    @property
    def sentence(self) -> str:
        """How things stand, for the status."""
        expires_at = self._current.expires_at
        if expires_at is None:
            return "AWS credentials without a known end"
        now = self._clock()
        if not self._reason:
            return f"AWS credentials until {clock_time(expires_at, now)}, renewed automatically"
        verb = "expired at" if now >= expires_at else "until"
        return (
            f"AWS credentials {verb} {clock_time(expires_at, now)}, could not be renewed: "
            f"{self._reason}. Log in again (`aws sso login`), or send others: `%gpupool env --aws`."
        )

    @property
    def due_s(self) -> float:
        """Seconds until the next try, by the clock; negative when it is overdue."""
        return self._due - self._clock()

    def _run(self) -> None:
        while not self._closed.wait(min(_SLICE_S, max(0.05, self.due_s))):
            if self.due_s <= 0:
                self._renew()

    def _renew(self) -> None:
        try:
            fresh = self._chain.resolve()  # may run a program, and take seconds
            if fresh.keys == self._current.keys:
                self._not_new()
                return
            send = self._send()
            if send is not None and not self._closed.is_set():
                send(fresh)
                self._take(fresh)
        except (ChainError, GpuPoolError) as error:
            self._fail(str(error).rstrip("."))

    def _not_new(self) -> None:
        """The chain gave the same again: a machine's role has new ones only near the end."""
        if self._clock() < (self._current.expires_at or 0):
            self._due = self._clock() + retry_s(self._lifetime_s)
        else:
            raise ChainError("the chain still gives the same ones")

    def _take(self, fresh: AwsCredentials) -> None:
        now = self._clock()
        self._current, self._reason, self._num_failures = fresh, "", 0
        self._lifetime_s = (fresh.expires_at or now) - now
        self._due = (fresh.expires_at or now) - lead_s(self._lifetime_s)

    def _fail(self, reason: str) -> None:
        self._due = self._clock() + retry_s(self._lifetime_s)
        self._num_failures += 1
        if self._num_failures < 2:  # the next try may do better, and is soon
            return
        self._reason = reason
        if self._num_failures == 2 and not self._closed.is_set():
            self._notify(self.sentence)


def clock_time(moment: float, now: float) -> str:
    """A time of day as on the user's clock, with the date if it is another day."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)
