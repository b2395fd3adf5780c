"""What all tests share: a real S3 server, real images in it, and a clean environment."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from demo import photos
from gpupool.core.machine.gpus import discover
from tests.servers.s3 import SeaweedServer
from tests.support.environment import environment, plain_environment

pytest_plugins = [
    "tests.servers.nvidia_driver",
    "tests.support.pools",
    "tests.support.shells",
    "tests.support.trainings",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="what is marked as long, and no more")
    parser.addoption("--hosts", action="store_true", help="also what is marked as hosts")


def pytest_configure(config: pytest.Config) -> None:
    """How many examples a property is tried with, where it does not say so itself."""
    settings.register_profile(
        "gpupool",
        deadline=None,  # how long one takes says nothing on a machine that others use too
        max_examples=200 if config.getoption("--long") else 25,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("gpupool")
    # pytest would set PYTEST_CURRENT_TEST, and ranks that start meanwhile would have it: with it
    # ipykernel leaves descriptors 1 and 2 alone, which it does in no notebook.
    assert callable(runner._update_current_test_var)
    runner._update_current_test_var = lambda item, when: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, with the reason."""
    if item.get_closest_marker("gpu") and (why_none := discover().why_none):
        pytest.skip(f"needs an NVIDIA GPU: {why_none}")


# What takes longest comes first, so that no process is left with it at the end; a folder's files
# follow each other, as they share servers and pools.
FOLDERS = (
    "browser",
    "hosts",
    "notebook",
    "faults",
    "e2e",
    "security",
    "pool",
    "training",
    "engine",
    "spmd",
    "host",
    "data",
)
# The files of which path or text has one of these run in one process: it takes long to start.
# (With xdist's own groups pytest 9.2 runs the tests of a file anywhere.)
SHARED = ("tests/browser/", "clean_kernel", "clean_terminal", "set_reader_keys")


def pytest_collection_finish() -> None:
    """Leave the million objects of imports out of each later search for garbage: half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """So that nothing is left, or reported as a leak."""
    _server.close()
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests, and sort them by folder; within one the order stays."""
    is_long, on_hosts = config.getoption("--long"), config.getoption("--hosts")
    chosen, others = [], []
    for item in items:
        # properties are in both, and are tried at length in the long run
        wanted = (item.get_closest_marker("long") is not None) == is_long
        wanted |= is_long and "tests/fuzz/" in item.nodeid
        wanted &= on_hosts or item.get_closest_marker("hosts") is None
        (chosen if wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)

    items.sort(key=place)


class FilesTogether(LoadFileScheduling):
    """Runs the tests of a file in one process, and those of files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _scope(self.config.rootpath, file)


@functools.cache
def _scope(root: Path, file: str) -> str:
    about = f"{file}\n{(root / file).read_text()}"
    return next((name for name in SHARED if name in about), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """How tests are dealt out, whatever `--dist` says."""
    return FilesTogether(config, log)


_server = contextlib.ExitStack()  # of the process that has the workers


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one S3 server before the first worker, for all of them."""
    config = node.config
    if not hasattr(config, "gpupool_s3"):
        config.gpupool_s3 = _server.enter_context(SeaweedServer()).address()
    node.workerinput["s3"] = config.gpupool_s3


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> Iterator[SeaweedServer]:
    """A SeaweedFS server for the whole run. `os.environ.update(s3.env)` makes s3:// mean it."""
    if (workerinput := getattr(request.config, "workerinput", None)) is not None:
        yield SeaweedServer.joined(workerinput["s3"])
        return
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="session")
def photos_url(s3: SeaweedServer) -> str:
    """A bucket with 20 real images of each of 10 classes in train/ and 10 of each in test/."""
    with (s3.folder / "photos").open("a+") as made:  # by the worker that comes first
        fcntl.flock(made, fcntl.LOCK_EX)
        if not os.fstat(made.fileno()).st_size:
            options, url = s3.storage_options, s3.make_bucket("photos")
            photos.upload(
                url, photos.source(), num_train=200, num_test=100, storage_options=options
            )
            made.write(url)
    return "s3://photos"


@pytest.fixture(scope="session", autouse=True)
def _own_ipython_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shells that tests make write their history: in a data base that no other process locks."""
    os.environ["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))


@pytest.fixture(autouse=True)
def clean_environ() -> Iterator[None]:
    """No test sees this machine's AWS settings and folders, nor what another test has set."""
    with environment(plain_environment()):
        yield
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
