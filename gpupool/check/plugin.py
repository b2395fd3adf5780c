"""pytest's side of a check: the pool, and a line for each promise. Runs on the client.

A promise is a test function: its docstring says it in the user's words, and its name is what
`--only` takes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupool.check.bench import Bench, Tell

_VERDICTS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}
_MAX_CHARS = 300  # of an error in a line


def name_of(function: str) -> str:
    """What a promise is called: "abort-item" of `test_abort_item`."""
    return function.removeprefix("test_").replace("_", "-")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where: the options of `gpupool.start`, as JSON."""
    parser.addoption("--where", type=json.loads, default={"device": "cpu", "n": 2})


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The pool that promises are tried on."""
    with tempfile.TemporaryDirectory(prefix="gpupool-check-") as folder:
        made = request.session.stash[_BENCH] = Bench(
            request.config.getoption("--where"), Path(folder)
        )
        yield made
        made.stop()


@pytest.fixture
def tell(record_property: Any) -> Tell:
    """What a promise that is kept tells what was found."""
    return lambda text: record_property("found", text)


_BENCH = pytest.StashKey[Bench]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a promise that is not kept has left must not be the next one's."""
    report = yield
    report.user_properties += [("promise", (item.obj.__doc__ or "").strip())]  # type: ignore[attr-defined]
    if report.when == "call" and report.failed and _BENCH in item.session.stash:
        item.session.stash[_BENCH].stop()
        if item.name == "test_start":
            item.session.shouldfail = "there is no pool"
    return report


class Lines:
    """Prints a line for each promise, in the place of pytest's own dots."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a promise is over: only the last one that counts has a line."""
        if report.when != "call" and report.passed:
            return
        told = dict(report.user_properties)
        name = name_of(report.location[2])
        text = str(told.get("found", ""))
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = (crash.message if crash else str(report.longrepr)).split("\n")[0][:_MAX_CHARS]
            text = text.removeprefix("AssertionError: ")
        verdict = _VERDICTS[report.outcome]
        end = f": {text}" if text else ""
        line = f"{verdict:>4}  {name}: {told['promise']} ({report.duration:.1f} s){end}"
        terminal: Any = self._plugins.getplugin("terminalreporter")
        terminal.write_line(line, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Have lines printed."""
    config.pluginmanager.register(Lines(config))


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """No dots: there are lines."""
    return (report.outcome, "", "") if report.when == "call" or not report.passed else None
