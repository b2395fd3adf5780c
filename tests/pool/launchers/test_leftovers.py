"""What a crash can leave: killed together, the notebook and its starter remove nothing any more."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gpupool.core.machine.locks import hold_folder
from gpupool.pool.launchers import starter


def test_folders_that_nobody_holds_any_more_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "of the user"
    left, held, young, theirs = (tmp_path / f"{starter._PREFIX}{n}" for n in range(4))
    for folder in (target, left, held, young, theirs):
        folder.mkdir(mode=0o700)
    (tmp_path / f"{starter._PREFIX}link").symlink_to(target)
    (tmp_path / f"{starter._PREFIX}file").touch()
    (left / "a file").touch()
    lock = hold_folder(held)
    assert lock is not None
    if os.geteuid() == 0:
        os.chown(theirs, 12001, 12001)
    else:
        theirs.rmdir()
    for path in {*tmp_path.iterdir()} - {young}:  # one that just starts holds no folder yet
        os.utime(path, (0, 0), follow_symlinks=False)
    before = {*tmp_path.iterdir()}
    starter._remove_abandoned()
    assert before - {*tmp_path.iterdir()} == {left}
    os.close(lock)
