"""Prove who is at the other end of gloo's connections before they are used. Runs on engines.

gloo's listener takes whoever of this machine's users connects first with the right number, and the
numbers are 0, 1, 2 ... (gloo/transport/tcp/listener.cc). So after a group is connected, and before
anything is sent in it, its members exchange the two ends of each of their connections, in
the store in the pool's private folder. A connection is proved if another member holds the same one
from its other side: two sockets of one machine cannot have the same two ends.

After that the listeners are deaf until the group is connected again: else a stranger could leave a
connection lying there that gloo would take then.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from gpupool.engine.group.gloo_sockets import Listener, ends, gloo_loops, shut
from gpupool.engine.group.rendezvous import exchange

NUM_ATTEMPTS = 4  # to form a group, each with new listeners
_NOBODYS = "0"  # inode in /proc/net/tcp of a socket that no process has; its user says nothing


_proved: frozenset[str] = frozenset()  # inodes of connections
_disturbers: set[str] = set()  # users who were seen; what they left lying may come up later


class UnprovedError(RuntimeError):
    """A group is not used: a connection of it does not lead to a member, on this rank or another.

    All members raise it alike.
    """


def listeners() -> frozenset[Listener]:
    """Those of gloo in this process now. A group's own are those that its making has added.

    What was split off a group shares them.
    """
    return frozenset(gloo_loops())


def set_deaf(listeners: Collection[Listener], deaf: bool) -> None:
    """Have these take no connections, or take them again.

    All members let theirs do it before one connects: the kernel waits a second to try again.
    """
    for listener in listeners:
        listener.set_deaf(deaf)


def prove(
    store: Any,
    key: str,
    place: int,
    size: int,
    listeners: Collection[Listener],
    failed: str = "",
) -> frozenset[str]:
    """Prove the connections that a group has made, in the loops of these listeners.

    All members call it when they have connected, or could not.

    Args:
        failed: why this rank could not connect; "" if it has.

    Returns:
        Inodes of the connections.

    Raises:
        UnprovedError: see there. It names the users who have disturbed.
    """
    global _proved
    __tracebackhide__ = True
    loops = gloo_loops()
    _proved &= {inode for found in loops.values() for inode in found.values()}
    made = [
        (fd, inode, ends(fd, inode))
        for listener in listeners
        for fd, inode in loops.get(listener, {}).items()
        if inode not in _proved
    ]
    mine = {
        "ends": [both for _, _, both in made if both],
        "ports": [listener.port for listener in listeners],
        "failed": failed,
    }
    facts = [json.loads(text) for text in exchange(store, key, place, size, json.dumps(mine))]
    # the same on each member from here on
    held = {(local, remote) for one in facts for local, remote in one["ends"]}
    strangers = {(local, remote) for local, remote in held if (remote, local) not in held}
    least = min(len(one["ends"]) for one in facts)
    reasons = [one["failed"] for one in facts if one["failed"]]
    if strangers or reasons or least < size - 1:
        ports = [port for one in facts for port in one["ports"]]
        # all look before one shuts a connection, which then no longer shows its user
        seen = json.dumps(_users(strangers, ports))
        found = exchange(store, f"{key}/users", place, size, seen)
        users = {user for text in found for user in json.loads(text)}
        _disturbers.update(users)
        for fd, inode, both in made:
            if both in strangers:
                shut(fd, inode, socket.SHUT_RDWR)
        users = users or (_disturbers if strangers else users)
        counts = f"{least} of {size - 1}"
        raise UnprovedError(_reason(reasons, sorted(users), bool(strangers), counts))
    inodes = frozenset(inode for _, inode, _ in made)
    _proved |= inodes
    return inodes


def _reason(reasons: Sequence[str], users: Sequence[str], has_strangers: bool, counts: str) -> str:
    if users:
        return (
            f"{' and '.join(users)} connects to ports of this pool on {socket.gethostname()} while "
            "its process group is formed, and was shut out. The administrator can end that."
        )
    if has_strangers:
        return (
            f"on {socket.gethostname()} somebody who has hung up since, or a process of this user, "
            "connected to the process group while it was formed, and was shut out."
        )
    if reasons:
        return reasons[0]
    return (
        f"{counts} of its gloo connections were found in /proc, so that nobody can prove who is "
        "at their other ends."
    )


def _users(strangers: Collection[tuple[str, str]], ports: Sequence[int]) -> list[str]:
    """Other users who hold a connection to these ports, or the other end of one of these."""
    uids = set()
    for row in _rows():
        local, remote = _address(row[1]), _address(row[2])
        port = int(row[2].rpartition(":")[2], 16)
        if row[9] != _NOBODYS and port and ((remote, local) in strangers or port in ports):
            uids.add(int(row[7]))
    return [_user_name(uid) for uid in uids - {os.getuid()}]


def _user_name(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"


def _rows() -> list[list[str]]:
    """Sockets of all users of this machine: proc(5), /proc/net/tcp."""
    return [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]


def _address(hexadecimal: str) -> str:
    address, _, port = hexadecimal.partition(":")
    return f"{socket.inet_ntoa(int(address, 16).to_bytes(4, 'little'))}:{int(port, 16)}"
