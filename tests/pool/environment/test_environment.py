"""Variables on their way to the ranks: names are shown, values are not, nowhere."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpupool
from gpupool import OptionsError, Pool
from gpupool.core.wire.masking import MASK
from gpupool.pool import session
from gpupool.pool.environment import own_modules
from tests.support.processes import folder_of
from tests.support.raising import raises

CANARY = "canary/Zx81+q7wLm0"
PROXY = f"http://ada:{CANARY.replace('/', '%2F')}@proxy.invalid:3128"
GET = "import os; os.environ.get({!r})"


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """A pool that was started while the notebook had a secret, which it was not told to send."""
    session.stop()
    os.environ["GPUPOOL_CANARY_TOKEN"] = CANARY
    os.environ["GPUPOOL_PLAIN"] = "plain"
    os.environ["GPUPOOL_PROXY"] = PROXY
    with gpupool.start(n=1, device="cpu") as pool:
        yield pool
        # The next pool starts without.
        if pool.status().state == "idle":
            pool.propagate_env("GPUPOOL_*", unset=True)


def value_on_ranks(pool: Pool, name: str) -> set[str | None]:
    return set(pool.run(GET.format(name)).values())


def test_names_and_globs_arrive_on_every_rank(pool2: Pool) -> None:
    os.environ.update(GPUPOOL_A1="one", GPUPOOL_A2="two", GPUPOOL_B="three")
    shown = pool2.propagate_env("GPUPOOL_A*", "GPUPOOL_B")
    assert list(shown) == ["GPUPOOL_A1", "GPUPOOL_A2", "GPUPOOL_B"]
    assert all(re.fullmatch("[0-9a-f]{6}", fingerprint) for fingerprint in shown.values())
    assert shown.items() <= pool2.status().env.items()
    assert value_on_ranks(pool2, "GPUPOOL_A2") == {"two"}
    with raises(OptionsError, "GPUPOOL_NO*"):
        pool2.propagate_env("GPUPOOL_A1", "GPUPOOL_NO*")
    os.environ["GPUPOOL_A2"] = "2"
    assert pool2.propagate_env("GPUPOOL_A2")["GPUPOOL_A2"] != shown["GPUPOOL_A2"]
    assert value_on_ranks(pool2, "GPUPOOL_A2") == {"2"}
    assert pool2.propagate_env("GPUPOOL_A*", "GPUPOOL_B", unset=True) == dict.fromkeys(shown, "")
    assert value_on_ranks(pool2, "GPUPOOL_A2") == {None}
    assert not shown.keys() & pool2.status().env.keys()


SLOW = """
import time
import fsspec

class Slow(fsspec.AbstractFileSystem):
    @classmethod
    def clear_instance_cache(cls):
        with open({!r} + str(rank), "a") as file:
            file.write("x")
        time.sleep(1)

fsspec.register_implementation("slow", Slow)
"""
FORGET = "import sys; sys.modules['fsspec.registry']._registry.pop('slow')"


def test_a_refresh_that_takes_long_is_made_once(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(SLOW.format(f"{tmp_path}/"))
    os.environ["GPUPOOL_PLAIN"] = "plain"
    pool2.propagate_env("GPUPOOL_PLAIN")  # a rank that has not answered is asked again meanwhile
    pool2.run(FORGET)
    pool2.propagate_env("GPUPOOL_PLAIN", unset=True)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["x", "x"]


def test_what_is_named_like_a_secret_is_not_inherited(own_pool: Pool) -> None:
    """And a URL with a password comes after the start. See `tests/e2e/test_secrets.py`."""
    assert own_pool.run(GET.format("GPUPOOL_PLAIN"))[0] == "plain"
    assert own_pool.run(GET.format("GPUPOOL_CANARY_TOKEN"))[0] is None
    assert "GPUPOOL_PROXY" in own_pool.status().env
    result = own_pool.run(GET.format("GPUPOOL_PROXY") + "\nprint(os.environ['GPUPOOL_PROXY'])")
    assert result.text(0) == f"http://ada:{MASK}@proxy.invalid:3128\n"
    assert own_pool.run(GET.format("GPUPOOL_PROXY"))[0] == PROXY
    own_pool.propagate_env("GPUPOOL_CANARY_TOKEN")
    result = own_pool.run(GET.format("GPUPOOL_CANARY_TOKEN"))
    assert (result[0], result.value_text(0)) == (CANARY, repr(MASK))
    # The pipe that ipykernel reads may be behind the cell's end.
    code = "import subprocess, time; subprocess.run(['env']); time.sleep(0.5)"
    assert own_pool.run(code).text(0).count(MASK) == 2


def test_files_of_a_pool_are_for_its_owner_alone(pool2: Pool) -> None:
    folder = folder_of(pool2)
    assert folder.stat().st_mode & 0o777 == 0o700
    # IPython copies a README for new profiles and with it its mode. What ranks write later (the
    # stores of groups) has the mode of the user's files; the folder is what keeps others out.
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "README" and not path.name[0].isdigit()
    ]
    assert len(files) >= 4
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    compiled = Path(pool2.run("import os; os.environ['TORCHINDUCTOR_CACHE_DIR']")[0])
    assert compiled.stat().st_mode & 0o777 == 0o700


def test_a_module_that_came_as_another_went_is_seen_to_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_modules, "_reloaded", {})  # what later cells would send
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("gone_module", "new_module"):
        (tmp_path / f"{name}.py").touch()
    importlib.import_module("gone_module")
    own_modules.reloaded()
    monkeypatch.delitem(sys.modules, "gone_module")
    module = importlib.import_module("new_module")
    own_modules.reloaded()
    importlib.reload(module)
    found = own_modules.reloaded()
    assert found is not None
    assert found.times == {"new_module": 1}


@pytest.mark.long
def test_a_propagated_name_is_remembered_for_the_next_pool(own_pool: Pool) -> None:
    os.environ["HF_HOME"] = "/models"
    own_pool.propagate_env("HF_*")
    own_pool.stop()
    with gpupool.start(n=1, device="cpu", env=["GPUPOOL_CANARY_TOKEN"]) as pool:
        assert set(pool.status().env) >= {"GPUPOOL_CANARY_TOKEN", "HF_HOME"}
        assert pool.run(GET.format("HF_HOME"))[0] == "/models"
        pool.propagate_env("HF_HOME", unset=True)
    with gpupool.start(n=1, device="cpu") as pool:
        assert "HF_HOME" not in pool.status().env
