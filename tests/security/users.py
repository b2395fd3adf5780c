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
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.security.lines import Actor
from tests.support.processes import until

ROOT = Path(__file__).parents[2]
_UIDS = range(41_000, 59_000, 2)  # of the range for ordinary users; few give any of these


class NoUsersError(Exception):
    """This machine does not let a test be another user."""


@dataclass
class User:
    """A user: `home` is its own folder, `folder` (mode 1777) everybody's."""

    name: str
    uid: int
    home: Path
    folder: Path
    actors: list[Actor] = field(default_factory=list)
    num_actors: int = 0

    def act(self, module: str, *arguments: object) -> Actor:
        """Start a module of the tests that serves commands."""
        command = [sys.executable, "-u", "-m", f"tests.{module}", *map(str, arguments)]
        self.num_actors += 1
        name = f"{self.name}-{module}-{self.num_actors}"
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
        """All that run as this user, zombies aside."""
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
        for process in left:  # no other test has this uid, see _free_uids
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return [f"{process.pid} {process.name()}" for process in left]

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command as this user."""
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        none = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        view = ["unshare", "--mount", "--propagation=private", "sh", "-eu", self.folder / "../view"]
        return [*map(str, view), "setpriv", *ids, *none, *command]

    def _environment(self) -> dict[str, str]:
        """As a login would set it; the machine's own variables may be secrets."""
        return {
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "TMPDIR": str(self.folder),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def two_users() -> Iterator[tuple[User, User]]:
    """The one who has a pool, and the one who attacks. No process of theirs is left at the end.

    Raises:
        NoUsersError: it says why there are none here.
    """
    if sys.platform != "linux" or os.getuid() != 0:
        raise NoUsersError("only root on Linux can start processes of two other users")
    if missing := [tool for tool in ("unshare", "setpriv") if shutil.which(tool) is None]:
        raise NoUsersError(f"{' and '.join(missing)} of util-linux not found")
    for file in (Path(__file__), Path(sys.executable).resolve()):
        if not file.stat().st_mode & stat.S_IROTH:  # a checkout with umask 077, say
            raise NoUsersError(f"other users may not read {file}")
    place = Path(tempfile.mkdtemp(prefix="gpupool-users-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, place)
        stack.enter_context(held := socket.socket(socket.AF_UNIX))
        uid = _free_uids(held)
        users = [
            User(f"gpupool-{name}", uid + number, place / name, place / "tmp")
            for number, name in enumerate(("alice", "bob"))
        ]
        _furnish(place, users)
        try:
            done = subprocess.run(users[0].command(["true"]), capture_output=True, text=True)
            if done.returncode != 0:
                raise NoUsersError(f"no process of another user starts: {done.stderr.strip()}")
            yield users[0], users[1]
        finally:
            left = [line for user in reversed(users) for line in user.close()]
        assert not left, f"these had not ended: {left}"


def _free_uids(held: socket.socket) -> int:
    """The first of two that nobody has; no other test takes them while this socket is open."""
    used = {process.uids().real for process in psutil.process_iter()}
    used |= {entry.pw_uid for entry in pwd.getpwall()}
    for uid in _UIDS:
        if not used & {uid, uid + 1}:
            with contextlib.suppress(OSError):  # another test has these
                held.bind(f"\0gpupool.tests.users.{uid}")
                return uid
    raise NoUsersError("all user ids that tests take are in use")


def _furnish(place: Path, users: list[User]) -> None:
    place.chmod(0o755)
    users[0].folder.mkdir()
    users[0].folder.chmod(0o1777)
    for user in users:
        user.home.mkdir(0o700)
        os.chown(user.home, user.uid, user.uid)
    (place / "stage").mkdir()
    lines = ["umask 022", *_opened(place / "stage"), 'exec "$@"', ""]
    (place / "view").write_text("\n".join(lines))


def _opened(stage: Path) -> Iterator[str]:
    """Commands that let everybody come to this Python, to what it imports and to the sources.

    A folder that others may not enter is covered by an empty one that they may, and what is needed
    of it is put back there.
    """
    yield _line("mount", "-t", "tmpfs", "gpupool", stage)
    wanted = {Path(one) for one in (sys.prefix, sys.base_prefix, ROOT, *sys.path) if one}
    needed: dict[Path, set[Path]] = {}  # of each folder that others may not enter
    for tree in sorted(one for one in {*wanted, *map(Path.resolve, wanted)} if one.is_dir()):
        way = [one for one in (*reversed(tree.parents), tree) if not one.stat().st_mode & 0o001]
        if way and not any(map(tree.is_relative_to, needed.get(way[0], ()))):
            needed.setdefault(way[0], set()).add(tree)
    for number, (folder, trees) in enumerate(needed.items()):
        yield _line("mkdir", stage / str(number))
        yield _line("mount", "--rbind", folder, stage / str(number))
        yield _line("mount", "-t", "tmpfs", "-o", "mode=0755", "gpupool", folder)
        for tree in sorted(trees):
            yield _line("mkdir", "-p", tree)
            source = tree.resolve().relative_to(folder)
            yield _line("mount", "--rbind", stage / str(number) / source, tree)


def _line(*words: object) -> str:
    return shlex.join(map(str, words))
