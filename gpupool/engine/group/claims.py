"""Whether the other ends of gloo's connections are ranks of the pool, on other hosts too. Runs on
engines.

No kernel tells who holds an end on another host. So, when a group is connected, each member says in
the store between which addresses its connections go, signed with the pool's key; each end that no
other member has claimed is a stranger's. Whoever can write to the store can keep a group from being
formed, or mix its ranks up, but has no place in it.

A connection is proved once: those of other groups lead to ranks that are no members of this one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping

from gpupool.engine.group.gloo_sockets import Ends, ends_of, gloo_connections, is_over, shut_out
from gpupool.engine.process import this_rank

_SIGNATURE_CHARS = 2 * hashlib.sha256().digest_size
_proved: set[tuple[int, Ends]] = set()  # with the inode of the socket


def claim(key: str, who: str) -> str:
    """What this process, `who`, says of its connections: a signature, and the ends."""
    with gloo_connections() as connections:
        text = json.dumps([ends_of(one) for one in connections if not is_over(one)])
    return _signature(key, who, text) + text


def refuse_unclaimed(key: str, claims: Mapping[str, str]) -> None:
    """Shut the connections whose other ends no other member has claimed.

    Args:
        claims: who -> what he has said, which is believed if it is signed with `key`.

    Raises:
        RuntimeError: there was one. It names the address.
    """
    __tracebackhide__ = True  # not the user's
    claimed: set[Ends] = set()
    for who, said in claims.items():
        text = said[_SIGNATURE_CHARS:]
        true = _signature(key, who, text) + text
        if hmac.compare_digest(true.encode(), said.encode()):
            claimed |= {(here, there) for there, here in json.loads(text)}
    with gloo_connections() as connections:
        live = [one for one in connections if not is_over(one)]
        marks = {one: (os.fstat(one.fileno()).st_ino, ends_of(one)) for one in live}
        known = {one for one in live if marks[one] in _proved or marks[one][1] in claimed}
        strange = {one: marks[one][1][1] for one in live if one not in known}
        shut_out(strange)
        _proved.clear()
        _proved.update(marks[one] for one in known)
    if strange:
        raise RuntimeError(
            f"{' and '.join(strange.values())}, at the other end of a connection of a process "
            f"group (gloo) on {this_rank().host}, is no rank of this pool, and was shut out: a "
            "stranger is on the network, or a NAT between the hosts, over which no pool can be."
        )


def _signature(key: str, who: str, text: str) -> str:
    return hmac.new(key.encode(), f"{who}\n{text}".encode(), "sha256").hexdigest()
