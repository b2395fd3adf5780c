"""Train one network on the ranks of the pool that train. Runs on the client.

These are the ranks with a GPU of their own, or all where none has one. The job (model, data, loss,
options) is pickled once into the pool's private folder and read by each of them; the first one
sends events while it trains and leaves the weights in a file.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.events import from_dict
from gpupool.core.options import LOSSES, TrainingOptions
from gpupool.pool.pool import Pool
from gpupool.pool.presses import ignore_for_a_moment
from gpupool.pool.result import OutputRecorder
from gpupool.training.head import require_module
from gpupool.training.history import TrainingHistory
from gpupool.training.result import TrainingResult

if TYPE_CHECKING:
    from torch import nn

_STOP_REQUEST = "gpupool_stop_request"  # answered by gpupool/engine/control.py

Listener = Callable[[TrainingHistory], None]


class TrainingRun:
    """A training that goes on in the background: a future with a live history.

    An inline pool trains in this thread: there the run is over when it has been made.

    Args:
        show: called with this run before the ranks start, to add listeners.

    Raises:
        TrainingError: the input cannot be trained on; no rank has started.
    """

    def __init__(
        self,
        pool: Pool,
        model: nn.Module,
        dataset: Any,
        loss: str | Callable[..., Any],
        options: TrainingOptions,
        validation: Any,
        show: Callable[[TrainingRun], None] = lambda run: None,
    ) -> None:
        pool.wait_until_usable()
        require_module(model)
        require_dataset("dataset", dataset)
        if validation is not None:
            require_dataset("validation", validation)
        if not isinstance(options, TrainingOptions):
            raise OptionsError(f"options={options!r}: give a gpupool.TrainingOptions(...).")
        if not callable(loss) and loss not in LOSSES:
            names = ", ".join(map(repr, LOSSES))
            raise TrainingError(f"loss={loss!r}: give {names} or a function (outputs, targets).")
        self.history = TrainingHistory()
        self.options = options
        self._pool = pool
        self._model = copy.deepcopy(model).cpu()
        self._listeners: list[Listener] = []
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._weights_path = pool.new_file("weights.pt")
        job = {
            "model": self._model,
            "dataset": dataset,
            "loss": loss,
            "options": options,
            "validation": validation,
        }
        self._job_path = write_job(pool, job)
        ranks = pool.training_ranks
        self._recorder = OutputRecorder(ranks, pool.hidden_values())
        payload = {"job_path": str(self._job_path), "result_path": str(self._weights_path)}
        show(self)
        self._execution = pool.execute(
            "train",
            dict.fromkeys(ranks, payload),
            self._on_output,
            on_interrupt=self.stop,
            on_notice=self._on_notice,
        )
        threading.Thread(target=self._finish, name="gpupool-training", daemon=True).start()

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(history)` after every batch of events, and once after the end.

        It is called in a background thread.
        """
        self._listeners.append(listener)

    def stop(self) -> None:
        """End training after the same step on every rank and keep the network; returns at once."""
        if not self.done():
            self.history.status = "stopping"
            self._pool.control(_STOP_REQUEST)

    def done(self) -> bool:
        """Whether training is over."""
        return self._finished.is_set()

    def text(self, rank: int) -> str:
        """What a rank that trains has printed so far."""
        return self._recorder.outputs[rank].text

    def result(self) -> TrainingResult:
        """The result, after waiting for it.

        The first Ctrl-C (or the notebook's stop button) is `stop()`; a second one, more than a
        second later, interrupts the ranks at once and loses the network.

        Raises:
            SpmdError: a rank failed.
        """
        interrupts = 0
        while not self._finished.is_set():
            try:
                self._finished.wait(0.1)
            except KeyboardInterrupt:
                ignore_for_a_moment()
                interrupts += 1
                if interrupts == 1:
                    self.stop()
                else:
                    self._execution.interrupt()
        if self._error is not None:
            raise self._error
        return TrainingResult(self._model, self.history, self.options)

    def _on_output(self, rank: int, kind: str, content: Any) -> None:
        if kind != "events":
            self._recorder(rank, kind, content)
            return
        stopping = self.history.status == "stopping"
        for event in content:
            self.history.add(from_dict(event))
        if stopping and self.history.status == "training":
            self.history.status = "stopping"
        self._notify()

    def _on_notice(self, text: str | None) -> None:
        if not self.history.is_over:
            self.history.notice = text or ""
            self._notify()

    def _finish(self) -> None:
        try:
            self._execution.result()
            self._load_weights()
        except BaseException as error:  # raised again in the thread that asks for the result
            self._error = error
            self.history.status = "failed"
            self.history.error = str(error)
        self.history.notice = ""
        self._job_path.unlink(missing_ok=True)  # gone with the folder when the pool was stopped
        self._recorder.finish()
        self._notify()
        self._finished.set()

    def _load_weights(self) -> None:
        import torch

        self._model.load_state_dict(torch.load(self._weights_path, weights_only=True))
        self._weights_path.unlink()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener(self.history)


def write_job(pool: Pool, job: dict[str, Any]) -> Path:
    """Pickle a job into the pool's private folder; returns the path.

    Raises:
        TrainingError: a part of it cannot be pickled; the message names it.
    """
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(job)
    except Exception as error:  # pickling runs arbitrary code of the objects' classes
        name = next(n for n, part in job.items() if not _can_pickle(part))
        raise TrainingError(f"{name} cannot be sent to the ranks: {error}") from None
    path = pool.new_file("job.pkl")
    path.write_bytes(pickled)
    return path


def _can_pickle(part: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(part)
    except Exception:  # as above; the caller tells of it
        return False
    return True


def require_dataset(name: str, dataset: Any) -> None:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TrainingError(
            f"{name} is a {type(dataset).__name__}: a data set needs len() and indexing, like "
            "gpupool.ImageDatastore or torch.utils.data.TensorDataset."
        )
    if len(dataset) == 0:
        raise TrainingError(f"{name} is empty.")
