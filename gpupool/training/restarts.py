"""Whether a training that has lost a rank resumes automatically. Pure. Runs on the client."""

from __future__ import annotations

import re
from dataclasses import replace

from gpupool.core.errors import SpmdError
from gpupool.core.wire.events import CheckpointEvent, ResumeEvent

_DIED = "EngineDiedError"


class Restarts:
    """Decides after each failure. `sentences` has one on each rank that was lost so far."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._last_step: int | None = None  # of the newest checkpoint at the last loss
        self.sentences: list[str] = []

    def goes_on(self, error: BaseException, newest_step: int) -> bool:
        """Whether to resume from the checkpoint of `newest_step` (0: there is none yet).

        After the death of a rank, and not after an error of the user's code; and only if there is
        a newer checkpoint than at the last loss: what kills a rank at the same place again and
        again would do so for ever.
        """
        # By the first error: ranks that were freed from a collective report errors of their own.
        if not self._wanted or not isinstance(error, SpmdError) or error.first.ename != _DIED:
            return False
        if self._last_step is not None and newest_step <= self._last_step:
            return False
        self._last_step = newest_step
        # Its first clause says how the rank ended; what follows is advice for a cell.
        how = re.split(r"[;.\n]", error.first.evalue)[0]
        self.sentences.append(f"{how}; it was replaced, and training resumed")
        return True

    def went_on_from(self, step: int) -> None:
        """The last sentence says from where; 0: from the beginning."""
        # Once for each loss: the sentence that has its place ends otherwise.
        if self.sentences and self.sentences[-1].endswith("training resumed"):
            self.sentences[-1] += f" from step {step}" if step else " from the beginning"


def with_checkpoint(error: SpmdError, newest: CheckpointEvent | ResumeEvent) -> SpmdError:
    """The error, saying where the newest checkpoint is."""
    how = "auto" if isinstance(newest, CheckpointEvent) else newest.url
    line = f"The checkpoint after step {newest.step} is at {newest.url}; resume={how!r} resumes"
    line += " from it."
    hint = "\n".join(filter(None, [error.first.hint, line]))
    errors = {**error.errors, error.first.rank: replace(error.first, hint=hint)}
    # A new error, as its message is made of the parts; cause and traceback are carried over.
    extended = SpmdError(errors, error.num_ranks)
    extended.__cause__ = error.__cause__
    return extended.with_traceback(error.__traceback__)
