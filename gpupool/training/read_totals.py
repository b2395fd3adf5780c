"""What reading the data of a training took, as the client sees it. Runs on the client."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpupool.core.wire.events import DataEvent


@dataclass
class Reads:
    """What reading the data took so far, over all ranks.

    `num_retried` reads failed and were made again, the last one because of `reason`. `skipped` maps
    the URLs of samples that were left out to what is wrong with them: "missing", "changed",
    "empty", "damaged" ... `read_by` is what reads the data: "8 workers"; "" of datastores.
    """

    num_retried: int = 0
    reason: str = ""
    num_skipped: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    read_by: str = ""
    _epoch: int = field(default=0, init=False, repr=False)
    _num_reads: int = field(default=0, init=False, repr=False)
    _num_cached: int = field(default=0, init=False, repr=False)

    def add(self, event: DataEvent) -> None:
        """Add the next event."""
        # Per epoch: the first one fills the cache, and its misses would hide what later ones find.
        if event.epoch != self._epoch:
            self._epoch, self._num_reads, self._num_cached = event.epoch, 0, 0
        self._num_reads += event.num_reads
        self._num_cached += event.num_cached
        self.num_retried += event.num_retried
        # An event without a retry has no reason, and must not erase the last one.
        self.reason = event.reason or self.reason
        self.num_skipped += event.num_skipped
        self.skipped.update(event.skipped)
        self.read_by = event.read_by or self.read_by

    @property
    def cached_share(self) -> float | None:
        """The share of the present epoch's reads that came from the cache; None: no cache."""
        return self._num_cached / (self._num_reads + self._num_cached) if self._num_cached else None

    def words(self) -> list[str]:
        """What is worth reporting, a phrase each.

        >>> Reads(num_retried=12, reason="503 SlowDown", num_skipped=1).words()
        ['12 reads retried (503 SlowDown)', '1 sample skipped']
        """
        phrases = [f"read by {self.read_by}"] if self.read_by else []
        if self.num_retried:
            reason = f" ({self.reason})" if self.reason else ""
            phrases.append(f"{many(self.num_retried, 'read')} retried{reason}")
        if self.num_skipped:
            phrases.append(f"{many(self.num_skipped, 'sample')} skipped")
        if self.cached_share is not None:
            phrases.append(f"{self.cached_share:.0%} from the cache")
        return phrases


def many(number: int, what: str) -> str:
    """A count with its noun.

    >>> many(1, "read"), many(1200, "read")
    ('1 read', '1,200 reads')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"
