"""The process behind `slow_s3.py`: `python -m tests.servers.proxy PORT`. Runs anywhere.

It prints its own port in answer to the first command on stdin, one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

ERRORS = {
    "503": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "500": ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
    "expired": ("403 Forbidden", "ExpiredToken", "The provided token has expired."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied."),
}
# What breaks the connection: reset at once, half of the body and the end, half and then silence,
# no answer at all.
BREAKS = ("reset", "cut", "stall", "silence")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """What happens to a `share` of the requests with `match` in the first line, `times` at most.

    `kind` is one of "503", "500", "expired", "denied", "reset", "cut", "stall", "silence"; `method`
    "GET", "PUT".
    """

    kind: str
    share: float = 1.0
    match: str = ""
    times: int | None = None
    method: str = "GET"

    def __post_init__(self) -> None:
        known = (*ERRORS, *BREAKS)
        if self.kind not in known:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(known)}")


class _Proxy:
    """What the connections share: where to, how late, what goes wrong; and the numbers."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.random = random.Random(0)
        self.first_byte_s = (0.0, 0.0)
        self.faults: list[tuple[Fault, list[int]]] = []  # with how often it happened
        self.stats: Counter[str] = Counter()
        self.at_once = 0
        self.clients: set[_Client] = set()
        self.is_gone = False

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Change what the command names; it may ask for the numbers since it last did."""
        if "seed" in command:
            self.random.seed(command["seed"])
        if "first_byte_ms" in command:
            low, high = command["first_byte_ms"]
            self.first_byte_s = (low / 1e3, high / 1e3)
        if "faults" in command:
            self.faults = [(Fault(**fault), [0]) for fault in command["faults"]]
        if "gone" in command:
            self.is_gone = command["gone"]
            for client in self.clients if self.is_gone else ():
                client.transport.abort()
        if "stats" not in command:
            return {}
        stats, self.stats = self.stats, Counter()
        return {"stats": stats}

    def begin(self) -> None:
        """A request has come."""
        self.at_once += 1
        self.stats["requests"] += 1
        self.stats["max_at_once"] = max(self.stats["max_at_once"], self.at_once)

    def choose(self, request_line: str) -> str:
        """The kind of fault that befalls a request, "" for none."""
        method = request_line.split(" ")[0]
        for fault, happened in self.faults:
            used_up = fault.times is not None and happened[0] >= fault.times
            fits = fault.method == method and fault.match in request_line
            if not used_up and fits and self.random.random() < fault.share:
                happened[0] += 1
                self.stats[fault.kind] += 1
                return fault.kind
        return ""


class _Client(asyncio.Protocol):
    """One connection of a client, with one of its own to the server."""

    def __init__(self, proxy: _Proxy) -> None:
        self.proxy = proxy
        self.waiting: deque[tuple[bytes, str | None]] = deque()  # pieces; with a fault: a request
        self.head = b""
        self.body_left = 0
        self.passes_on = True
        self.busy: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.proxy.clients.add(self)
        connecting = asyncio.get_running_loop().create_connection(
            lambda: _Server(self), "127.0.0.1", self.proxy.target
        )
        self.server = asyncio.ensure_future(connecting)

    def data_received(self, data: bytes) -> None:
        while data:
            if self.body_left:
                piece, data = data[: self.body_left], data[self.body_left :]
                self.body_left -= len(piece)
                self.waiting.append((piece, None))
                continue
            self.head, data = self.head + data, b""
            end = self.head.find(b"\r\n\r\n") + 4
            if end >= 4:
                head, data, self.head = self.head[:end], self.head[end:], b""
                length = _LENGTH.search(head)
                self.body_left = int(length[1]) if length else 0
                line = head[: head.index(b"\r\n")].decode("latin-1")
                self.waiting.append((head, self.proxy.choose(line)))
        if self.busy is None or self.busy.done():
            self.busy = asyncio.ensure_future(self._pass_on())

    async def _pass_on(self) -> None:
        try:
            server, _ = await self.server
        except OSError:  # nobody listens there
            self.transport.abort()
            return
        while self.waiting:
            piece, fault = self.waiting.popleft()
            if fault is not None:
                self.passes_on = await self._begin(fault)
            if self.passes_on:  # the body goes where its head went
                server.write(piece)

    async def _begin(self, fault: str) -> bool:
        """Wait as long as the network takes; whether the request is to be passed on at all."""
        _, server = await self.server
        self.proxy.begin()
        server.begin(fault)
        if self.proxy.first_byte_s[1]:
            await asyncio.sleep(self.proxy.random.uniform(*self.proxy.first_byte_s))
        if fault in ERRORS:
            server.answered()
            self.transport.write(_answer(*ERRORS[fault]))
        elif fault == "reset":
            self.transport.abort()
        return fault in ("", "cut", "stall")

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.clients.discard(self)
        if self.busy is not None:
            self.busy.cancel()
        self.server.add_done_callback(_close)


class _Server(asyncio.Protocol):
    """The connection to the server that belongs to one of a client."""

    def __init__(self, client: _Client) -> None:
        self.client = client
        self.begin("")
        self.unanswered = False

    def begin(self, fault: str) -> None:
        """A request comes, whose answer is to break as `fault` says."""
        self.fault = fault
        self.left: int | None = None  # bytes of the answer until it breaks, once that is known
        self.unanswered = True

    def answered(self) -> None:
        """The answer to the request has begun, or will never come."""
        if self.unanswered:
            self.unanswered = False
            self.client.proxy.at_once -= 1

    def data_received(self, data: bytes) -> None:
        self.answered()
        if self.fault in ("cut", "stall"):
            if self.left is None:
                length = _LENGTH.search(data)
                self.left = data.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 2) // 2
            data = data[: self.left]
            self.left -= len(data)
        self.client.transport.write(data)
        if self.fault == "cut" and self.left == 0:
            self.client.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.answered()
        self.client.transport.close()


def _answer(status: str, code: str, message: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def _close(connecting: asyncio.Future[tuple[asyncio.Transport, _Server]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].close()


async def _serve(target: int) -> None:
    """Serve, and obey the commands on stdin, one JSON object a line, until it is closed."""
    loop = asyncio.get_running_loop()
    proxy = _Proxy(target)

    async def listen(at: int = 0) -> asyncio.Server:
        return await loop.create_server(lambda: _Client(proxy), "127.0.0.1", at, backlog=512)

    server = await listen()
    port = {"port": server.sockets[0].getsockname()[1]}
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        told = proxy.obey(json.loads(line))
        if proxy.is_gone:
            server.close()
        elif not server.is_serving():
            server = await listen(port["port"])
        print(json.dumps({**port, **told}), flush=True)
    os._exit(0)  # not waiting for anybody


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
