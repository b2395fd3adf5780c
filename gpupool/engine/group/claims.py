"""Whether the other ends of gloo's connections are ranks of the pool, on other hosts too. Runs on
engines.

No kernel tells who holds an end on another host. So, when a group is connected, each member says in
the store between which addresses its connections go, signed with the pool's key; each end that no
other member has claimed is a stranger's. Whoever can write to the store can keep a group from being
formed, or mix its ranks up, but has no place in it.

A connection is proved once: those of other groups lead to ranks that are no members of this one.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterable

from gpupool.engine.group.gloo_sockets import Ends, ends_of, gloo_connections, is_over, shut_out
from gpupool.engine.process import this_rank

_SIGNATURE_CHARS = 64  # HMAC-SHA256, in hexadecimal digits
_proved: set[tuple[int, Ends]] = set()  # with the inode of the socket


def claim(key: str) -> str:
    """What this process says of its connections: a signature, and the ends."""
    with gloo_connections() as connections:
        text = json.dumps([ends_of(one) for one in connections if not is_over(one)])
    return _signature(key, text) + text


def refuse_unclaimed(key: str, claims: Iterable[str]) -> None:
    """Shut the connections whose other ends no member has claimed.

    Args:
        claims: what members have said, which is believed if it is signed with `key`.

    Raises:
        RuntimeError: there was one. It names the address.
    """
    __tracebackhide__ = True  # not the user's
    claimed: set[Ends] = set()
    for said in claims:
        text = said[_SIGNATURE_CHARS:]
        true = _signature(key, text) + text
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


def _signature(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()
