"""What is said while ranks do something else than steps: it is seen while it goes on.

Real pools; a store that takes its time, a file that takes no more than somebody reads.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from gpupool import Pool, TrainingHistory, TrainingOptions, TrainingRun
from gpupool.core.jobs import InferenceJob
from gpupool.core.options.training_options import Profile
from gpupool.core.progress import Course
from gpupool.core.wire.calls import Predict
from gpupool.core.wire.requests import Counts
from gpupool.engine.training.callbacks import CallbackInfo
from gpupool.notebook.monitor.words import STOPPING, headline
from gpupool.training.predict import ask
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import SlowS3
from tests.support.pools import Pools
from tests.support.processes import folder_of
from tests.support.trainings import network, samples, wait_until

pytestmark = pytest.mark.long

SLOW_MS = (2500, 2500)  # of every answer: what is over within a second is not told


class Waits:
    """A callback that stays in a step of the first rank until the test lets it go on."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def __call__(self, info: CallbackInfo) -> None:
        if (info.event, info.step, info.rank) == ("step", self.step, 0):
            (self.folder / "waits").touch()
            wait_until((self.folder / "go").exists)

    def is_there(self) -> bool:
        return (self.folder / "waits").exists()

    def let_go(self) -> None:
        (self.folder / "go").touch()


def begun(pool: Pool, options: TrainingOptions, num: int = 64) -> tuple[TrainingRun, list[str]]:
    """A training, and the headlines that its views have in turn."""
    said: list[str] = []

    def listen(history: TrainingHistory) -> None:
        if [headline(history)] != said[-1:]:
            said.append(headline(history))

    run = TrainingRun(
        pool,
        network(),
        samples(num),
        "cross_entropy",
        options,
        None,
        show=lambda run: run.add_listener(listen),
    )
    return run, said


def test_who_waits_for_a_trace_or_for_tensorboard_is_told_so(
    pools: Pools, tmp_path: Path, s3: SeaweedServer
) -> None:
    url, waits = s3.make_bucket(f"aside-{uuid4().hex}"), Waits(tmp_path, 1)
    with SlowS3(s3.endpoint) as slow:
        pools[2].environment.set(s3.env | {"AWS_ENDPOINT_URL": slow.endpoint})
        options = TrainingOptions(
            epochs=1,
            batch_size=16,
            callbacks=[waits],
            tensorboard=f"{url}/board",
            profile=Profile(url=f"{url}/trace", skip=2, steps=1),
        )
        run, said = begun(pools[2], options)
        wait_until(waits.is_there)
        slow.set_latency(SLOW_MS)  # what is looked at before training was quick
        waits.let_go()
        assert run.result().warnings == []
    pools[2].environment.set(s3.env)
    begin = said.index("Training: epoch 1 of 1")
    assert said[begin:-2] == [
        "Training: epoch 1 of 1",
        "Training: epoch 1 of 1, saving the profile",
        "Training: epoch 1 of 1",
        "Training: epoch 1 of 1, writing the TensorBoard events",
        "Training: epoch 1 of 1",
    ]
    assert said[-2] == "Training: epoch 1 of 1, reading the network"
    assert said[-1].startswith("Finished: 1 epoch in ")


def test_a_stop_is_heard_with_the_next_report_and_said_until_then(
    pools: Pools, tmp_path: Path
) -> None:
    """Asked after every tenth step, known on all ranks a step later."""
    waits = Waits(tmp_path, 12)
    options = TrainingOptions(epochs=1, batch_size=16, callbacks=[waits])
    run, said = begun(pools[2], options, num=3200)
    wait_until(waits.is_there)
    wait_until(lambda: len(run.history.steps) >= 10)
    run.stop()
    for answer in pools[2].engines.control(Counts(), [0, 1]).values():
        answer.result()  # the ranks answer in order: they have heard of the stop
    assert headline(run.history) == STOPPING
    waits.let_go()
    result = run.result()
    assert (result.stopped_by, len(result.history.steps)) == ("user", 21)
    after = said[said.index(STOPPING) :]
    assert after[0] == STOPPING
    assert after[-1] == "Stopped after step 21 of 200"
    assert not any(one.startswith("Training") for one in after)


def test_who_waits_for_outputs_is_told_that_they_are_saved(
    pools: Pools, tmp_path: Path, drawn: list[Course]
) -> None:
    job = InferenceJob(network(), samples(20_000), TrainingOptions(batch_size=4096))
    name = pools[1].engines.new_file("outputs").name
    path = folder_of(pools[1]) / f"{name}.0"
    os.mkfifo(path)  # a file that takes no more than somebody reads

    def read() -> bytes:
        with path.open("rb") as file:
            begun = file.read(1000)
            time.sleep(2.5)
            return begun + file.read()

    with ThreadPoolExecutor(1) as thread:
        content = thread.submit(read)
        ask("predict", pools[1], job, partial(Predict, result_name=name))
    (tmp_path / "read").write_bytes(content.result())
    outputs: list[Any] = torch.load(tmp_path / "read", weights_only=True)
    assert torch.cat(outputs).shape == (20_000, 3)
    said = [(course.what, course.note) for course in drawn]
    assert ("Predicting", "saving the outputs") in said
    last = drawn[-1]
    assert (last.what, last.note, last.done, last.is_over) == ("Predicting", "", 20_000, True)
