"""Two users of this machine without any privilege, for as long as the tests run.

Nothing of the machine is changed. Each process of theirs has a view of the files of its own (a
mount namespace): in it folders on the way to this Python and to the sources that others may not
enter, such as /root, hold nothing but these. Processes, network, and the folder that both may write
to are those of the machine.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.security.lines import Actor
from tests.support.processes import until

ROOT = Path(__file__).parents[2]
_UIDS = range(41_000, 59_000, 2)  # of the range for ordinary users; few give any of these


@dataclass
class User:
    """A user: `home` is its own folder, `folder` (mode 1777) everybody's."""

    name: str
    uid: int
    home: Path
    folder: Path
    actors: list[Actor] = field(default_factory=list)

    def act(self, module: str, *arguments: object) -> Actor:
        command = [sys.executable, "-u", "-m", f"tests.{module}", *map(str, arguments)]
        name = f"{self.name}-{module}"
        log = self.home / f"{name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                self.command(command),
                env=self._environment(),
                cwd=self.home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.actors.append(Actor(name, process, log))
        return self.actors[-1]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.uids().real == self.uid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> list[str]:
        """End its processes; returns those that had not ended by themselves."""
        while self.actors:
            self.actors.pop().close()
        with contextlib.suppress(AssertionError):
            until(lambda: not self.processes(), 2.0)
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return [f"{process.pid} {process.name()}" for process in left]

    def command(self, command: Sequence[str]) -> list[str]:
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        none = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        view = ["unshare", "--mount", "--propagation=private", "sh", "-eu", self.folder / "../view"]
        return [*map(str, view), "setpriv", *ids, *none, *command]

    def _environment(self) -> dict[str, str]:
        """As a login would set it; the machine's own variables may be secrets."""
        return {
            "HOME": str(self.home),
            "USER": self.name,
            "TMPDIR": str(self.folder),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }


def two_users(place: Path) -> tuple[User, User]:
    """Alice and Bob, who have ids that nobody has and what they need in this folder."""
    used = {process.uids().real for process in psutil.process_iter()}
    used |= {entry.pw_uid for entry in pwd.getpwall()}
    uid = random.choice([uid for uid in _UIDS if not used & {uid, uid + 1}])
    place.chmod(0o755)
    folder = place / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    alice = User("gpupool-alice", uid, place / "alice", folder)
    bob = User("gpupool-bob", uid + 1, place / "bob", folder)
    for user in (alice, bob):
        user.home.mkdir(0o700)
        os.chown(user.home, user.uid, user.uid)
    (place / "stage").mkdir()
    lines = ["umask 022", *_opened(place / "stage"), 'exec "$@"', ""]
    (place / "view").write_text("\n".join(lines))
    return alice, bob


def _opened(stage: Path) -> Iterator[str]:
    """Commands that let everybody come to this Python, to what it imports and to the sources.

    A folder that others may not enter is covered by an empty one that they may, and what is needed
    of it is put back there.
    """
    yield _line("mount", "-t", "tmpfs", "gpupool", stage)
    wanted = {Path(one) for one in (sys.prefix, sys.base_prefix, ROOT, *sys.path) if one}
    needed: dict[Path, list[Path]] = {}  # of each folder that others may not enter
    for tree in sorted(one for one in {*wanted, *map(Path.resolve, wanted)} if one.is_dir()):
        way = [one for one in (*reversed(tree.parents), tree) if not one.stat().st_mode & 0o001]
        if way:
            needed.setdefault(way[0], []).append(tree)
    for number, (folder, trees) in enumerate(needed.items()):
        yield _line("mkdir", stage / str(number))
        yield _line("mount", "--rbind", folder, stage / str(number))
        yield _line("mount", "-t", "tmpfs", "-o", "mode=0755", "gpupool", folder)
        for tree in trees:
            yield _line("mkdir", "-p", tree)
            source = tree.resolve().relative_to(folder)
            yield _line("mount", "--rbind", stage / str(number) / source, tree)


def _line(*words: object) -> str:
    return shlex.join(map(str, words))
