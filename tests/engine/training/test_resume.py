"""A training that goes on from a checkpoint is the one that was never interrupted."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from gpupool import (
    DataError,
    SpmdError,
    TrainingHistory,
    TrainingOptions,
    TrainingResult,
    TrainingRun,
)
from gpupool.engine.training.callbacks import CallbackInfo
from gpupool.engine.training.checkpoints import Checkpoints
from gpupool.engine.training.checkpoints import packed as sealed
from tests.engine.training.vectors import Vectors
from tests.servers.s3 import SeaweedServer
from tests.support.pools import Pools
from tests.support.raising import raises, same_on
from tests.support.trainings import (
    Centred,
    Held,
    Slow,
    network,
    samples,
    train_on,
    wait_until,
    wait_until_heard,
)

STEPS = 24  # 3 epochs of 8 steps, the last of each smaller
EVERYTHING: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 24,
    "optimizer": "adamw",
    "lr": 0.01,
    "weight_decay": 0.1,
    "warmup": 5,
    "schedule": "cosine",
    "ema": 0.9,
    "accumulate": 2,
    "clip": 1.0,
    "validate_every": 5,
}


class Once(Dataset[Any]):
    """Samples of which one fails, or kills its rank: once, or always where no file notes it."""

    def __init__(self, num: int, index: int, note: Path | None, *, kills: bool = False) -> None:
        self.samples, self.index, self.note, self.kills = samples(num), index, note, kills

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.index and (self.note is None or not self.note.exists()):
            if self.note is not None:
                self.note.touch()
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            # until the other rank is through its step: an interrupt in the middle leaves half of it
            time.sleep(1.0)
            raise DataError(f"sample {index} is damaged")
        return self.samples[index]


class Notes:
    """A callback that leaves a file for its rank after a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def __call__(self, info: CallbackInfo) -> None:
        if (info.event, info.step) == ("step", self.step):
            (self.folder / f"rank {info.rank}").touch()


def rich_network() -> nn.Module:
    """Dropout draws random numbers, batch norm has statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def points() -> TensorDataset:
    return samples(180)


def outcome(result: TrainingResult) -> dict[str, Any]:
    """All that must be the same, as bytes: NaN is equal to itself so."""
    history = result.history
    return {
        "weights": {k: v.numpy().tobytes() for k, v in result.model.state_dict().items()},
        "steps": [(s.step, s.epoch, s.loss, s.accuracy, s.lr) for s in history.steps],
        "validations": [(v.step, v.loss, v.accuracy, v.is_best) for v in history.validations],
        "stopped_by": result.stopped_by,
        "kept": result.kept_step,
    }


@pytest.fixture(scope="module")
def whole(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[dict[str, Any], Path]]:
    """Uninterrupted trainings on 1 and 3 ranks, with a checkpoint after every step."""
    found = {}
    for num_ranks, pool in pools.items():
        folder = tmp_path_factory.mktemp("whole")
        result = train_on(
            pool,
            rich_network(),
            points(),
            validation=samples(30, seed=1),
            checkpoint=str(folder),
            checkpoint_every=1,
            num_checkpoints=STEPS,
            **EVERYTHING,
        )
        found[num_ranks] = outcome(result), folder
    return found


def some_steps() -> list[object]:
    """20 steps at random, on 1 and 3 ranks in turn: six at every run of the tests."""
    chosen = random.Random(7).sample(range(1, STEPS), 20)
    return [
        pytest.param((1, 3)[number % 2], step, marks=pytest.mark.long if number >= 6 else ())
        for number, step in enumerate(chosen)
    ]


@pytest.mark.parametrize(("num_ranks", "step"), some_steps())
def test_it_is_the_same_to_the_last_bit_from_any_step(
    pools: Pools,
    whole: dict[int, tuple[dict[str, Any], Path]],
    num_ranks: int,
    step: int,
) -> None:
    expected, folder = whole[num_ranks]
    result = train_on(
        pools[num_ranks],
        rich_network(),
        points(),
        validation=samples(30, seed=1),
        resume=f"{folder}/step-{step:08}.pt",
        **EVERYTHING,
    )
    assert result.history.resumed is not None
    assert result.history.resumed.step == step
    assert outcome(result) == expected


@pytest.mark.parametrize("first", [Centred, nn.Identity])
def test_what_buffers_hold_is_the_same_to_the_last_bit(
    pools: Pools, tmp_path: Path, first: type[nn.Module]
) -> None:
    """Those put in the place of others; and of a batch norm, used for a share of one sample."""
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 12}
    model, data = nn.Sequential(first(), rich_network()), samples(26)
    expected = train_on(pools[2], model, data, **settings)
    train_on(pools[2], model, data, max_steps=4, checkpoint=str(tmp_path), **settings)
    result = train_on(pools[2], model, data, checkpoint=str(tmp_path), resume=True, **settings)
    assert outcome(result)["weights"] == outcome(expected)["weights"]
    assert result.history.loss == expected.history.loss


def test_a_share_that_skipping_leaves_with_one_sample_is_the_same_to_the_last_bit(
    pools: Pools, tmp_path: Path
) -> None:
    """It is normalised with the statistics so far: by those that a checkpoint has."""
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 1, "shuffle": "never"}
    settings |= {"on_error": "skip"}
    data = Vectors(24, {19})  # of step 5, in which the second rank has 18 and 19
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    expected = train_on(pools[2], model, data, **settings)
    assert [step.num_samples for step in expected.history.steps] == [4, 4, 4, 4, 3, 4]
    train_on(pools[2], model, data, max_steps=3, checkpoint=str(tmp_path), **settings)
    result = train_on(pools[2], model, data, checkpoint=str(tmp_path), resume=True, **settings)
    assert outcome(result)["weights"] == outcome(expected)["weights"]
    assert result.history.loss == expected.history.loss


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_on_another_number_of_ranks_it_is_the_same_but_for_rounding(
    pools: Pools, tmp_path: Path, before: int, after: int
) -> None:
    settings = {"epochs": 3, "batch_size": 10, "optimizer": "adamw", "lr": 0.01}
    data = samples(25, torch.float64)
    expected = train_on(pools[before], network(torch.float64), data, **settings)
    half = {**settings, "max_steps": 4, "checkpoint": str(tmp_path)}
    train_on(pools[before], network(torch.float64), data, **half)
    result = train_on(
        pools[after],
        network(torch.float64),
        data,
        checkpoint=str(tmp_path),
        resume="auto",
        **settings,
    )
    assert result.history.resumed is not None
    assert result.history.resumed.step == 4
    assert result.history.loss == pytest.approx(expected.history.loss, rel=0, abs=1e-12)
    for name, tensor in expected.model.state_dict().items():
        assert torch.allclose(result.model.state_dict()[name], tensor, rtol=0, atol=1e-12)


def test_what_was_stopped_goes_on_from_s3(pools: Pools, s3: SeaweedServer, tmp_path: Path) -> None:
    os.environ.update(s3.env)
    url = f"{s3.make_bucket(f'run-{uuid4().hex}')}/run"
    pools[2].environment.set(s3.env)
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 8, "checkpoint": url}
    expected = train_on(pools[2], network(), samples(96), epochs=2, batch_size=8)
    goes_on = tmp_path / "goes on"
    run = TrainingRun(
        pools[2],
        network(),
        Held(96, goes_on, num_free=48),  # half of what each rank reads
        "cross_entropy",
        TrainingOptions(**settings),
        None,
    )
    wait_until(lambda: len(run.history.steps) > 3)
    run.stop()
    wait_until_heard(pools[2])
    goes_on.touch()
    stopped = run.result()
    assert stopped.stopped_by == "user"
    step = len(stopped.history.steps)
    assert stopped.checkpoint == f"{url}/step-{step:08}.pt"
    result = train_on(pools[2], network(), samples(96), resume="auto", **settings)
    assert result.history.resumed is not None
    assert result.history.resumed.step == step
    assert result.history.loss == expected.history.loss
    # Once more: there is nothing left to do, and the network is there.
    again = train_on(pools[2], network(), samples(96), resume="auto", **settings)
    for one in (result, again):
        for name, tensor in expected.model.state_dict().items():
            assert torch.equal(one.model.state_dict()[name], tensor)


@pytest.mark.long
@pytest.mark.parametrize("index", [40, 43])  # in the share of the second rank, of the first
def test_a_sample_that_fails_on_one_rank_leaves_a_checkpoint_that_the_error_names(
    pools: Pools, tmp_path: Path, index: int
) -> None:
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 6, "shuffle": "never"}
    expected = train_on(pools[2], network(), samples(60), **settings)
    options = {**settings, "checkpoint": str(tmp_path / "run"), "checkpoint_every": "epoch"}
    data = Once(60, index, tmp_path / "failed")
    with pytest.raises(SpmdError, match=f"sample {index} is damaged") as caught:
        train_on(pools[2], network(), data, **options)
    shown = "\n".join(caught.value._render_traceback_())
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    step = index // 6
    # Batches are read ahead, so it may have failed before the steps in between were made.
    assert len(names) == 1
    made = int(names[0][5:13])
    assert 0 < made <= step
    assert f"The checkpoint after step {made} is at {tmp_path}/run/{names[0]}" in shown
    result = train_on(pools[2], network(), data, resume="auto", **options)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor)
    # What was not reported before the failure has no loss; all the others are the same.
    losses = zip(result.history.loss, expected.history.loss, strict=True)
    differ = [n for n, (a, b) in enumerate(losses, 1) if a != b]
    assert all(made - made % 10 < step <= made for step in differ)


@pytest.mark.parametrize("rank", [1, 0])
def test_after_a_kill_it_goes_on_by_itself(pools: Pools, tmp_path: Path, rank: int) -> None:
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 6}
    expected = train_on(pools[2], network(torch.float64), samples(60, torch.float64), **settings)
    options = TrainingOptions(
        checkpoint=str(tmp_path / "run"), checkpoint_every=4, on_failure="resume", **settings
    )
    goes_on = tmp_path / "goes on"
    data = Held(60, goes_on, num_free=45, dtype=torch.float64)  # half of what each rank reads
    run = TrainingRun(pools[2], network(torch.float64), data, "cross_entropy", options, None)
    wait_until(lambda: run.history.checkpoint is not None)
    os.kill(pools[2].status().pids[rank], signal.SIGKILL)
    goes_on.touch()
    result = run.result()
    assert result.stopped_by == "epochs"
    resumed = result.history.resumed
    assert resumed is not None
    assert resumed.step >= 4
    told = result.warnings[0]  # it may also tell of a kernel that was out of memory before
    assert told.startswith(f"rank {rank} was killed by SIGKILL")
    last = result.history.steps[-1].step  # the new rank tells how it fares, as the others do
    assert {n: event.step for n, event in result.history.ranks.items()} == {0: last, 1: last}
    assert told.endswith(f"; it was replaced, and training resumed from step {resumed.step}")
    assert [s.step for s in result.history.steps] == list(range(1, 31))
    for name, tensor in expected.model.state_dict().items():
        assert torch.allclose(result.model.state_dict()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.long
def test_without_a_checkpoint_yet_it_begins_anew(pools: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 6}
    options = TrainingOptions(checkpoint=str(tmp_path), on_failure="resume", **settings)
    data = Once(60, 3, tmp_path / "killed", kills=True)
    run = TrainingRun(pools[1], network(), data, "cross_entropy", options, None)
    result = run.result()
    assert result.warnings[0].endswith("training resumed from the beginning")
    assert len(result.history.steps) == 10


def test_the_same_cell_again_overwrites_what_it_made_before(pools: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 6, "checkpoint": str(tmp_path)}
    train_on(pools[2], network(), samples(24), epochs=3, **settings)
    with raises(SpmdError, "resume='auto'", "overwrite=True"):
        train_on(pools[2], network(), samples(24), epochs=2, **settings)
    result = train_on(pools[2], network(), samples(24), epochs=2, overwrite=True, **settings)
    assert [step.step for step in result.history.steps] == [*range(1, 9)]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000004.pt", "step-00000008.pt"]
    more = train_on(pools[2], network(), samples(24), epochs=3, resume="auto", **settings)
    assert more.history.resumed is not None
    assert more.history.resumed.step == 8


@pytest.mark.long
@pytest.mark.parametrize("replaced", [False, True])
def test_stop_is_heard_although_a_rank_dies(pools: Pools, tmp_path: Path, replaced: bool) -> None:
    options = TrainingOptions(
        epochs=10_000,
        batch_size=6,
        checkpoint=str(tmp_path),
        checkpoint_every=4,
        on_failure="resume",
    )
    is_replaced = threading.Event()

    def listen(history: TrainingHistory) -> None:
        if "it is replaced" in history.notice:
            is_replaced.set()

    run = TrainingRun(pools[2], network(), Slow(60, 0.003), "cross_entropy", options, None)
    run.add_listener(listen)
    wait_until(lambda: run.history.checkpoint is not None)
    if not replaced:
        run.stop()
    os.kill(pools[2].status().pids[1], signal.SIGKILL)
    if replaced:
        assert is_replaced.wait(60)
        run.stop()
    result = run.result()
    assert result.stopped_by == "user"
    assert result.checkpoint == f"{tmp_path}/step-{len(result.history.steps):08}.pt"


@pytest.mark.parametrize(
    ("stopped_by", "settings"),
    [
        ("epochs", {"epochs": 1, "checkpoint_every": 1}),
        ("max_steps", {"max_steps": 6}),  # in the middle of an epoch
        ("patience", {"patience": 2, "lr": 3.0}),
    ],
)
def test_what_is_over_does_not_go_on(
    pools: Pools, tmp_path: Path, stopped_by: str, settings: dict[str, Any]
) -> None:
    settings = {"epochs": 20, "batch_size": 6, "checkpoint": str(tmp_path), **settings}
    validation = samples(12, seed=3)
    first, again = (
        train_on(pools[2], network(), samples(24), validation=validation, resume="auto", **settings)
        for _ in range(2)
    )
    assert first.stopped_by == stopped_by
    assert outcome(again) == outcome(first)
    assert again.checkpoint == first.checkpoint == max(map(str, tmp_path.iterdir()))


def test_weights_that_are_no_numbers_are_not_saved(pools: Pools, tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1 + (outputs - outputs.detach()).sum().abs().sqrt()  # its gradient is NaN

    settings = {"batch_size": 6, "checkpoint": str(tmp_path), "checkpoint_every": 1}
    result = train_on(pools[2], network(), samples(24), loss=loss, epochs=1, **settings)
    assert result.stopped_by == "diverged"
    assert list(tmp_path.iterdir()) == []


def test_another_training_is_refused_in_one_sentence(pools: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 6, "checkpoint": str(tmp_path)}
    train_on(pools[2], network(), samples(24), **settings)
    more = {**settings, "epochs": 2, "resume": "auto"}
    other = str(tmp_path / "step-00000099.pt")
    wrong: list[tuple[nn.Module, int, dict[str, Any], tuple[str, ...]]] = [
        (network(), 25, more, ("24 samples", "25 samples")),
        (network(), 24, more | {"seed": 1}, ("seed=0", "seed=1")),
        (
            network(),
            24,
            more | {"shuffle": "never"},
            (
                "shuffle",
                "'every-epoch'",
            ),
        ),
        (nn.Linear(8, 3), 24, more, ("Missing key",)),
        (network(), 24, more | {"optimizer": "adam"}, ("sgdm", "adam")),
        (
            network(),
            24,
            more | {"normalize": "fit"},
            (
                "normalize",
                "'none'",
            ),
        ),
        (network(), 24, more | {"ema": 0.9}, ("ema",)),
        (network(), 24, settings, ()),
        (network(), 24, more | {"resume": other}, ("step-00000099.pt",)),
    ]
    for model, num, changed, shown in wrong:
        with raises(SpmdError, shown, ename="TrainingError") as caught:
            train_on(pools[2], model, samples(num), **changed)
        assert len(str(caught.value).splitlines()) == 1
        assert same_on(caught.value, 0, 1)
    result = train_on(pools[2], network(), samples(24), **more | {"lr": 0.5})
    assert [s.lr for s in result.history.steps] == [0.01] * 4 + [0.5] * 4


def test_a_damaged_checkpoint_is_passed_over(pools: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 6, "checkpoint": str(tmp_path)}
    first = train_on(pools[2], network(), samples(24), **settings)
    newest = tmp_path / "step-00000012.pt"
    damaged = newest.read_bytes()[:1000]
    newest.write_bytes(damaged)
    again = train_on(pools[2], network(), samples(24), resume="auto", **settings)
    assert again.history.resumed is not None
    assert again.history.resumed.step == 8
    assert again.warnings == [f"{newest} is cut short or damaged, and was passed over."]
    assert outcome(again) == outcome(first)
    assert again.checkpoint == str(tmp_path / "step-000000012.pt")
    assert newest.read_bytes() == damaged  # it might have been the user's


@pytest.mark.long
def test_a_sealed_file_that_holds_no_whole_state_is_said_on_every_rank(
    pools: Pools, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 6, "checkpoint": str(tmp_path)}
    train_on(pools[2], network(), samples(24), **settings)
    name = "step-00000004.pt"
    whole = Checkpoints(str(tmp_path)).load(name)
    states: list[dict[str, Any]] = [
        {key: value for key, value in whole.items() if key != left_out} for left_out in whole
    ]
    states += [{}, whole | {"told": 5}, whole | {"training": []}, whole | {"judge": {"best": 1}}]
    for state in states:
        (tmp_path / name).write_bytes(sealed(state))
        with pytest.raises(SpmdError) as caught:
            train_on(pools[2], network(), samples(24), **settings, resume="auto")
        assert f"{name} " in str(caught.value)
        assert same_on(caught.value, 0, 1)


def test_resume_true_needs_a_checkpoint(pools: Pools, tmp_path: Path) -> None:
    with raises(SpmdError, "resume", ename="TrainingError"):
        train_on(pools[2], network(), samples(8), checkpoint=str(tmp_path / "new"), resume=True)
    result = train_on(
        pools[2], network(), samples(8), epochs=1, checkpoint=str(tmp_path / "new"), resume="auto"
    )
    assert result.history.resumed is None


def test_checkpoints_that_fail_on_the_way_are_warnings_and_training_goes_on(
    pools: Pools, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = TrainingOptions(epochs=2, batch_size=4, checkpoint=str(folder), checkpoint_every=2)
    goes_on = tmp_path / "goes on"
    data = Held(40, goes_on, num_free=20)  # half of what each rank reads
    run = TrainingRun(pools[2], network(), data, "cross_entropy", options, None)
    wait_until(lambda: run.history.checkpoint is not None)
    for number in itertools.count():
        folder.rename(tmp_path / f"elsewhere {number}")
        with contextlib.suppress(IsADirectoryError):  # a step that is not held has made it again
            folder.write_text("a file in its place")
            break
    goes_on.touch()
    result = run.result()
    assert result.stopped_by == "epochs"
    assert any("there is a file where the folder should be" in one for one in result.warnings)


@pytest.mark.long
def test_the_second_interrupt_leaves_a_checkpoint_that_the_error_names(
    pools: Pools, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4}
    over = tmp_path / "over"
    data = Held(1600, over, num_free=10)  # of steps with 2 samples on each rank
    folder = tmp_path / "run"
    options = TrainingOptions(checkpoint=str(folder), callbacks=[Notes(tmp_path, 5)], **settings)
    seen = threading.Event()
    run = TrainingRun(pools[2], network(), data, "cross_entropy", options, None)

    def press_twice() -> None:
        for rank in (0, 1):  # nothing is reported before the epoch is over
            wait_until((tmp_path / f"rank {rank}").exists)
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: run.history.status == "stopping")
        time.sleep(1.1)  # sooner it would count as the same press
        seen.set()
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press_twice).start()
    with pytest.raises(SpmdError, match="KeyboardInterrupt") as caught:
        run.result()
    over.touch()
    assert seen.is_set()
    assert [path.name for path in folder.iterdir()] == ["step-00000005.pt"]
    shown = "\n".join(caught.value._render_traceback_())
    assert f"The checkpoint after step 5 is at {folder}/step-00000005.pt" in shown
    expected = train_on(pools[2], network(), samples(1600), **settings)
    result = train_on(
        pools[2], network(), samples(1600), checkpoint=str(folder), resume="auto", **settings
    )
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor)


def test_by_time_the_first_ranks_clock_decides(pools: Pools, tmp_path: Path) -> None:
    result = train_on(
        pools[2],
        network(),
        Slow(80, 0.002),
        epochs=2,
        batch_size=4,
        checkpoint=str(tmp_path),
        checkpoint_every="0.05s",
    )
    assert result.history.checkpoint is not None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[-1] == "step-00000040.pt"  # the end
    step = int(names[0][5:13])
    assert step % 10 == 1 or step == 20  # sums are read a step later, but where an epoch ends
    assert 2 < step < 40
