"""A pool that is this process: the same API as with engines, and nothing left behind.

The first part runs against a real engine and against this process; what it asks of both is equal.
"""

from __future__ import annotations

import builtins
import inspect
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from gpupool import (
    InlinePool,
    OptionsError,
    Pool,
    PoolError,
    PoolOptions,
    SpmdError,
    TrainingError,
    TrainingOptions,
    TrainingRun,
)
from gpupool.pool import session
from gpupool.pool.inline import InlineEngines
from gpupool.pool.processes.engines import Engines
from gpupool.pool.processes.interface import RankEngines
from tests.notebook.kernel import plain
from tests.support.processes import folder_of, press_when, reach, reached, until
from tests.support.raising import frames_of_ours, raises
from tests.support.trainings import network, samples, train_on, weights

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"


@pytest.fixture(scope="module")
def engine() -> Iterator[Pool]:
    """A pool of one engine."""
    with Pool(PoolOptions(n=1, device="cpu")) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)  # before each test's environment is remembered
def inline() -> Iterator[Pool]:
    """A pool that is this process."""
    with InlinePool(PoolOptions(device="cpu")) as pool:
        yield pool


@pytest.fixture(params=["engine", "inline"])
def either(request: pytest.FixtureRequest) -> Pool:
    """Both kinds of pool in turn."""
    pool: Pool = request.getfixturevalue(request.param)
    return pool


def error_of(pool: Pool, code: Any, *args: Any, **options: Any) -> SpmdError:
    with pytest.raises(SpmdError) as caught:
        pool.run(code, *args, **options)
    return caught.value


# ---- the same from both ----------------------------------------------------------------------


def test_names_and_the_group_are_there(either: Pool) -> None:
    names = "rank, world_size, local_rank, str(device), torch.__name__, dist.get_world_size()"
    assert either.run(names)[0] == (0, 1, 0, "cpu", "torch", 1)
    assert dict(either.run(SUM)) == {0: 1.0}
    variables = "import os; [os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')]"
    assert either.run(variables)[0] == ["0", "1", "0"]
    assert (either.world_size, either.backend, either.generation) == (1, "gloo", 1)


def test_a_cell_gives_value_text_and_times(either: Pool) -> None:
    result = either.run("import sys\nkept = 7\nprint('out')\nprint('x\\ry')\n'v' * 3")
    assert (result[0], result.value_text(0), result.text(0)) == ("vvv", "'vvv'", "out\ny\n")
    assert 0 <= result.rank_elapsed_s(0) <= result.elapsed_s
    assert either.run("kept + 1")[0] == 8
    nothing = either.run("nothing = 1")
    assert (nothing[0], nothing.value_text(0), nothing.text(0)) == (None, "", "")


def test_a_value_that_cannot_travel_stays(either: Pool) -> None:
    result = either.run("import threading; threading.Lock()")
    assert "lock object" in result.value_text(0)
    with raises(PoolError, "no value", ranks=(0,)):
        result[0]


def test_a_function_gets_copies_and_its_value_comes_back(either: Pool) -> None:
    seen = {"calls": 0}

    def add(a: int, *, b: int) -> int:
        seen["calls"] += 1
        print("adding")
        return a + b

    result = either.run(add, 1, b=2)
    assert (result[0], result.text(0), seen["calls"]) == (3, "adding\n", 0)


def test_await_magics_shell_and_displays_in_a_cell(either: Pool) -> None:
    assert either.run("import asyncio\nawait asyncio.sleep(0.01, 'slept')")[0] == "slept"
    assert either.run("%pwd")[0] == os.getcwd()
    assert either.run("!echo from the shell").text(0).strip() == "from the shell"
    shown = either.run("from IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\nHTML('<i>')")
    kinds = [(d["kind"], d["data"]["text/html"]) for d in shown.outputs[0].displays]
    assert kinds == [("display", "<b>x</b>"), ("result", "<i>")]
    assert shown.text(0) == ""


@pytest.mark.parametrize(
    "code",
    [
        "def inner():\n    raise ValueError('mine')\ninner()",
        "def f(:\n    pass",
        "if True:\nx = 1",
        "raise KeyboardInterrupt",
        "import sys; sys.exit(3)",
        "await 3",
        "raise ExceptionGroup('many', [ValueError(1)])",
        "torch.ones(2) @ torch.ones(3)",
        "undefined_name",
    ],
)
def test_an_error_reads_as_one_of_an_engine(engine: Pool, inline: Pool, code: str) -> None:
    errors = []
    for pool in (engine, inline):
        error = error_of(pool, code)
        first = error.first
        # the engine's own library is the same one
        texts = (str(error), first.ename, first.evalue, plain(first.traceback))
        # each pool counts its own runs
        errors.append([re.sub(r"pool\.run \d+", "pool.run", text) for text in texts])
        assert not frames_of_ours(first.traceback)
        assert dict(pool.run(SUM)) == {0: 1.0}
    assert errors[0] == errors[1]


def test_a_function_that_raises(either: Pool) -> None:
    def fail(value: int) -> None:
        raise LookupError(f"no {value}")

    error = error_of(either, fail, 7)
    assert str(error).startswith("rank 0: LookupError: no 7 (1 of 1 ranks failed; test_inline.py")
    assert "raise LookupError" in plain(error.first.traceback)


@pytest.mark.parametrize(
    "code",
    ["import time; time.sleep(60)", "while True: pass", "import asyncio; await asyncio.sleep(60)"],
)
def test_a_time_limit_and_ctrl_c_end_a_cell_where_it_is(
    either: Pool, tmp_path: Path, code: str
) -> None:
    started = time.monotonic()
    # In the code, and not while it is compiled, where Python 3.11.7 may raise SystemError instead.
    error = error_of(either, code, timeout_s=1.0)
    assert error.first.ename == "TimeoutError"
    assert error.first.evalue.endswith(" 1 s")
    begun = tmp_path / "rank"
    is_here = either.options.inline  # in the cell; else it waits for the engine
    press = do_when if is_here else press_when
    presser = press(lambda: reached(begun, 0))
    error = error_of(either, f"kept = 5\n{reach(begun)}\n{code}")
    presser.join()
    assert error.first.ename == "KeyboardInterrupt"
    assert "File <pool.run" in plain(error.first.traceback)
    assert not frames_of_ours(error.first.traceback)
    assert (either.run("kept")[0], either.run("rank", timeout_s=30)[0]) == (5, 0)
    assert time.monotonic() - started < 50


def do_when(holds: Callable[[], bool], act: Callable[[], object] | None = None) -> threading.Thread:
    """Have a thread do something, or press Ctrl-C, as soon as this holds; to be joined."""
    press = act or (lambda: os.kill(os.getpid(), signal.SIGINT))
    thread = threading.Thread(target=lambda: (until(holds, 20.0), press()))
    thread.start()
    return thread


def test_a_time_limit_that_is_over_before_the_work_has_begun_ends_it(either: Pool) -> None:
    error = error_of(either, "while True: pass", timeout_s=1e-6)
    assert error.first.ename == "TimeoutError"


def test_variables_are_named_by_fingerprints_and_masked(either: Pool) -> None:
    os.environ.update(MY_TOKEN="s3cr3t-value", MY_MODE="fast")
    marks = either.propagate_env("MY_*")
    try:
        assert {name: len(mark) for name, mark in marks.items()} == {"MY_MODE": 6, "MY_TOKEN": 6}
        assert dict(either.status().env) == marks
        code = "import os\nprint(os.environ['MY_TOKEN'], os.environ['MY_MODE'])"
        assert either.run(code).text(0) == "[hidden] fast\n"
        assert "s3cr3t" not in str(error_of(either, "raise ValueError(os.environ['MY_TOKEN'])"))
    finally:
        either.propagate_env("MY_*", unset=True)
    assert either.status().env == {}


def test_ranks_are_named_and_refused_alike(either: Pool) -> None:
    assert dict(either.run("rank", ranks="-1")) == {0: 0}
    with raises(OptionsError, "ranks", "ranks", shown=" 0 to 0"):
        either.run("rank", ranks=1)
    assert either.run("print('x')", ranks=[0]).ranks == (0,)


def test_the_state_and_the_quiet_commands(either: Pool) -> None:
    assert (either.status().state, either._all_ranks.engines.alive_ranks()) == ("idle", [0])
    either.interrupt()
    assert isinstance(either.log(0), str)
    execution = either.begin("1 + 1", ranks=(0,), on_output=lambda *_: None)
    assert set(execution.result()) == {0}
    assert execution.done()


def test_the_group_can_be_formed_again(either: Pool) -> None:
    generation = either.generation
    either.reform_group()
    assert either.status().reason == ""
    assert either.generation == generation + 1
    assert dict(either.run(SUM)) == {0: 1.0}


class FailsAt(Dataset[Any]):
    """Samples of which one cannot be read."""

    def __init__(self, index: int) -> None:
        self.samples, self.index = samples(32), index

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            raise ValueError(f"sample {index} is damaged")
        return self.samples[index]


def test_training_gives_the_same_network(engine: Pool, inline: Pool) -> None:
    settings = {"epochs": 2, "batch_size": 12, "validation": samples(20, seed=1)}
    theirs = train_on(engine, network(), samples(50), **settings)
    ours = train_on(inline, network(), samples(50), **settings)
    assert torch.equal(weights(ours.model), weights(theirs.model))
    assert ours.history.loss == theirs.history.loss
    assert len(ours.history.validations) == 2
    assert (ours.history.status, ours.stopped_by) == ("finished", "epochs")


def test_training_that_fails(either: Pool) -> None:
    with pytest.raises(SpmdError, match="ValueError: sample 7 is damaged"):
        train_on(either, network(), FailsAt(7), batch_size=8, epochs=1)
    with raises(TrainingError, "cannot send", "dataset"):
        train_on(either, network(), _unpicklable(), batch_size=8, epochs=1)
    folder = folder_of(either)
    assert [p.name for p in folder.iterdir() if p.suffix in (".pkl", ".pt")] == []
    assert train_on(either, network(), samples(8), epochs=1).stopped_by == "epochs"


def _unpicklable() -> Dataset[Any]:
    dataset = FailsAt(-1)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    return dataset


def test_the_public_methods_are_those_of_a_pool() -> None:
    def signatures(kind: type, names: set[str]) -> dict[str, Any]:
        methods = {name: getattr(kind, name) for name in names}
        return {name: inspect.signature(m) for name, m in methods.items() if callable(m)}

    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(InlinePool) == public(Pool)
    assert signatures(InlinePool, public(Pool)) == signatures(Pool, public(Pool))
    asked = public(RankEngines)
    assert asked <= public(Engines)
    assert signatures(InlineEngines, asked) == signatures(Engines, asked)


# ---- this process ----------------------------------------------------------------------------


def test_rank_0_is_this_process_and_this_thread(inline: Pool) -> None:
    assert dict(inline.status().pids) == {0: os.getpid()}
    assert inline.status().inline
    assert inline.run("import threading; threading.get_ident()")[0] == threading.get_ident()
    assert inline.run(lambda: threading.get_ident())[0] == threading.get_ident()
    assert inline.ranks[0].num_threads == torch.get_num_threads()
    assert repr(inline) == "InlinePool(cpu, gloo, idle)"
    assert session.describe(inline) == "1 rank on CPU (gloo, inline)"
    assert "Rank 0 is this process" in inline.log(0)


def test_it_listens_on_loopback_alone_and_its_folder_is_private(inline: Pool) -> None:
    connections = psutil.Process().net_connections()
    ours = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    assert set(ours) <= {"127.0.0.1", "::1"}
    assert folder_of(inline).stat().st_mode & 0o777 == 0o700


def test_output_is_seen_at_once_and_noted(inline: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[tuple[str, str]] = []
    inline.begin(
        "print('a'); import sys; print('b', file=sys.stderr)",
        ranks=(0,),
        on_output=lambda rank, kind, content: notes.append((kind, content)),
    )
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("a\n", "b\n")
    assert "".join(text for kind, text in notes if kind == "stderr") == "b\n"
    print("not noted")
    assert not [text for _, text in notes if "not noted" in text]


def test_a_stream_taken_earlier_is_noted_too(inline: Pool) -> None:
    builtins.the_logger = logging.getLogger("here")  # type: ignore[attr-defined]
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("here").addHandler(handler)
    try:
        assert inline.run("the_logger.warning('careful')").text(0) == "careful\n"
    finally:
        logging.getLogger("here").removeHandler(handler)
        del builtins.the_logger  # type: ignore[attr-defined]


def test_what_it_prints_is_not_masked_on_the_screen_of_its_user(
    inline: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["MY_TOKEN"] = "s3cr3t-value"
    inline.propagate_env("MY_TOKEN")
    try:
        kept = inline.run("import os; print(os.environ['MY_TOKEN'])")
    finally:
        inline.propagate_env("MY_TOKEN", unset=True)
    assert (capsys.readouterr().out, kept.text(0)) == ("s3cr3t-value\n", "[hidden]\n")
    assert os.environ["MY_TOKEN"] == "s3cr3t-value"  # the notebook's own variables are its own


def test_an_error_leads_to_the_users_frame(inline: Pool) -> None:
    def fails(row: int) -> None:
        bad = row * 2
        raise LookupError(bad)

    error = error_of(inline, fails, 4)
    cause = error.__cause__
    assert isinstance(cause, LookupError)
    for raised in (error, cause):
        frame = raised.__traceback__
        assert frame is not None
        while frame.tb_next is not None:
            frame = frame.tb_next
        assert frame.tb_frame.f_locals == {"row": 4, "bad": 8}
    assert cause.__traceback__ is not None
    assert cause.__traceback__.tb_frame.f_code.co_name == "fails"  # none of ours above it


def test_code_that_runs_here_may_use_the_pool(inline: Pool) -> None:
    builtins.the_pool = inline  # type: ignore[attr-defined]
    try:
        result = inline.run("print('out'); the_pool.run('print(1); rank + 1')[0]")
        state = inline.run("the_pool.status().state")[0]
    finally:
        del builtins.the_pool  # type: ignore[attr-defined]
    assert (result[0], result.text(0)) == (1, "out\n1\n")
    assert (state, inline.status().state) == ("busy", "idle")


def test_another_thread_may_use_it_and_interrupt_it(inline: Pool, tmp_path: Path) -> None:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(inline.run("rank + 3")[0]))
    thread.start()
    thread.join(20)
    assert values == [3]

    begun = tmp_path / "rank"
    other = do_when(lambda: reached(begun, 0), inline.interrupt)
    code = f"{reach(begun)}; import time; time.sleep(60)"
    assert error_of(inline, code).first.ename == "KeyboardInterrupt"
    other.join()


def test_a_time_limit_needs_the_main_thread(inline: Pool) -> None:
    refused: list[PoolError] = []

    def run() -> None:
        try:
            inline.run("1", timeout_s=1)
        except PoolError as error:
            refused.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert refused[0].kind == "inline"
    assert str(refused[0]).startswith("timeout_s: ")


# ---- training here ---------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """Samples that take their time; notes the threads that read them."""

    def __init__(self, num: int, delay_s: float) -> None:
        self.samples, self.delay_s = samples(num), delay_s

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        print("read in", threading.current_thread().name)
        time.sleep(self.delay_s)
        return self.samples[index]


def test_samples_are_read_in_this_thread_and_the_history_moves(inline: Pool) -> None:
    seen: list[tuple[str, int]] = []

    def show(run: TrainingRun) -> None:
        run.add_listener(lambda history: seen.append((history.status, len(history.steps))))

    options = TrainingOptions(batch_size=8, epochs=1)
    run = TrainingRun(inline, network(), Slow(16, 0), "cross_entropy", options, None, show=show)
    run.result()
    moved = [n for _, n in seen if n]
    assert (moved, {*moved}) == (sorted(moved), {1, 2})
    assert set(run.text(0).splitlines()) == {f"read in {threading.main_thread().name}"}


def test_training_leaves_the_random_numbers_alone(inline: Pool) -> None:
    model, state = network(), torch.get_rng_state()
    train_on(inline, model, samples(8), epochs=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_interrupt_stops_training_and_keeps_the_network(inline: Pool) -> None:
    before = signal.getsignal(signal.SIGINT)
    options = TrainingOptions(batch_size=4, epochs=1000)

    def show(run: TrainingRun) -> None:
        do_when(lambda: bool(run.history.steps))

    data = Slow(40, 0.001)
    run = TrainingRun(inline, network(), data, "cross_entropy", options, None, show=show)
    result = run.result()
    assert (result.stopped_by, result.history.status) == ("user", "stopped")
    assert 0 < len(result.history.steps) < 10_000
    assert signal.getsignal(signal.SIGINT) is before
    assert train_on(inline, network(), samples(8), epochs=1).stopped_by == "epochs"


def test_it_has_no_engines_that_a_plain_client_could_connect_to(inline: Pool) -> None:
    with raises(PoolError, "inline"):
        _ = inline.client


def test_the_second_interrupt_ends_it(inline: Pool) -> None:
    options = TrainingOptions(batch_size=4000, epochs=1000)  # asks after a step, of 40 s

    reads: list[str] = []  # what the samples print, in the thread that hears the interrupts

    def interrupt_twice() -> None:
        for _ in range(2):
            reads.clear()
            until(lambda: len(reads) > 10, 20.0)
            os.kill(os.getpid(), signal.SIGINT)

    def show(run: TrainingRun) -> None:
        run.add_output_listener(lambda rank, kind, content: reads.append(kind))
        threading.Thread(target=interrupt_twice).start()

    data = Slow(4000, 0.01)
    run = TrainingRun(inline, network(), data, "cross_entropy", options, None, show=show)
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        run.result()


def test_stop_from_another_thread_is_heard(inline: Pool) -> None:
    def show(run: TrainingRun) -> None:
        threading.Timer(0.4, run.stop).start()  # as the monitor's button does it

    options = TrainingOptions(batch_size=4, epochs=1000)
    data = Slow(40, 0.001)
    run = TrainingRun(inline, network(), data, "cross_entropy", options, None, show=show)
    assert run.result().stopped_by == "user"
