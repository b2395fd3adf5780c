"""A network as it is, before an S3 server of this machine: latency and faults. Runs anywhere.

    with SeaweedServer() as server, SlowS3(server.endpoint, first_byte_ms=(30, 60)) as slow:
        os.environ.update(server.env, AWS_ENDPOINT_URL=slow.endpoint)
        slow.inject(Fault("503", share=0.1), Fault("cut", match="/7.jpg", times=1))
        ...
        print(slow.stats())        # {"requests": 120, "503": 11, "cut": 1}

It hands on one request after the other, in a process of its own, so that it does not compute in the
client's. Signatures stay good: the Host header is handed on as it is.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Self

import aiohttp
from aiohttp import web
from yarl import URL

ERRORS = {
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "500": (500, "InternalError", "We encountered an internal error."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied."),
}
OF_ONE_CONNECTION = ("Connection", "Expect", "Keep-Alive", "Transfer-Encoding")
FOR_EVER_S = 3600.0


@dataclass(frozen=True)
class Fault:
    """What happens to a `share` of the requests with `match` in the path, `times` at most.

    The connection is "reset" at once; "cut" after half of the body; has half of it and then silence
    ("stall"), or no answer at all ("silence"). Each other `kind` is an answer of the store.
    """

    kind: Literal["503", "500", "expired", "denied", "reset", "cut", "stall", "silence"]
    share: float = 1.0
    match: str = ""
    times: int | None = None
    method: str = "GET"


class SlowS3:
    """A proxy on a free loopback port; it ends with this process, also after a kill -9.

    Every request waits a random time within `first_byte_ms` before it is passed on.
    """

    def __init__(self, endpoint: str, first_byte_ms: tuple[float, float] = (0, 0)) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._commands, theirs = spawn.Pipe()
        arguments = theirs, endpoint, first_byte_ms
        self._process = spawn.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint = ""

    def __enter__(self) -> Self:
        self.endpoint = f"http://127.0.0.1:{self._commands.recv()}"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._commands.close()

    def inject(self, *faults: Fault) -> None:
        """These faults from now on, instead of earlier ones; the first that fits happens."""
        self._ask("inject", faults)

    def be_gone(self, is_gone: bool = True) -> None:
        """Refuse every connection and end those there are; False: be there again."""
        self._ask("be_gone", is_gone)

    def stats(self) -> dict[str, int]:
        """How many requests there were since the last call, and how often each fault happened."""
        return dict(self._ask("take_stats"))

    def _ask(self, command: str, *arguments: object) -> Any:
        self._commands.send((command, arguments))
        return self._commands.recv()


# ---- its process -----------------------------------------------------------------------------


class _Proxy:
    """Where to, how late, what goes wrong; and the numbers."""

    def __init__(self, target: str, first_byte_ms: tuple[float, float]) -> None:
        self.target = target
        self.random = random.Random(0)
        self.first_byte_s = [ms / 1e3 for ms in first_byte_ms]
        self.faults: list[tuple[Fault, list[int]]] = []  # with how often it happened
        self.stats: Counter[str] = Counter()

    async def serve(self, commands: Connection) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,  # all is handed on as it is
            skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
        ) as self.server:
            commands.send(await self.listen())
            while True:
                command, arguments = await asyncio.to_thread(commands.recv)
                commands.send(await getattr(self, command)(*arguments))

    async def listen(self, port: int = 0) -> int:
        make = asyncio.get_running_loop().create_server
        self.listening = await make(self.runner.server, "127.0.0.1", port, backlog=512)
        self.port: int = self.listening.sockets[0].getsockname()[1]
        return self.port

    async def inject(self, faults: tuple[Fault, ...]) -> None:
        self.faults = [(fault, [0]) for fault in faults]

    async def take_stats(self) -> Counter[str]:
        stats, self.stats = self.stats, Counter()
        return stats

    async def be_gone(self, is_gone: bool) -> None:
        if is_gone:
            self.listening.close()
            for connection in self.runner.server.connections:
                if connection.transport is not None:  # its client has gone
                    connection.transport.abort()
        elif not self.listening.is_serving():
            await self.listen(self.port)

    def choose(self, request: web.Request) -> str:
        """The kind of fault that befalls a request, "" for none."""
        for fault, happened in self.faults:
            used_up = fault.times is not None and happened[0] >= fault.times
            fits = fault.method == request.method and fault.match in request.raw_path
            if not used_up and fits and self.random.random() < fault.share:
                happened[0] += 1
                self.stats[fault.kind] += 1
                return fault.kind
        return ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """What a client hears, as late as on a real network."""
        fault, sent = self.choose(request), await request.read()
        self.stats["requests"] += 1
        if self.first_byte_s[1]:
            await asyncio.sleep(self.random.uniform(*self.first_byte_s))
        if fault in ERRORS:
            status, code, message = ERRORS[fault]
            body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            return web.Response(status=status, text=body, content_type="application/xml")
        if fault == "reset":
            request.transport.abort()
        if fault in ("reset", "silence"):
            await asyncio.sleep(FOR_EVER_S)
        url = URL(self.target + request.raw_path, encoded=True)
        headers = _handed_on(request.headers)
        async with self.server.request(request.method, url, headers=headers, data=sent) as told:
            body = await told.read()
        headers = _handed_on(told.headers)
        if fault not in ("cut", "stall"):
            return web.Response(status=told.status, headers=headers, body=body)
        half = web.StreamResponse(status=told.status, headers=headers)
        half.content_length = len(body)
        await half.prepare(request)
        await half.write(body[: len(body) // 2])
        if fault == "cut":
            request.transport.close()
        await asyncio.sleep(FOR_EVER_S)
        return half


def _handed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.title() not in OF_ONE_CONNECTION}


def _run(commands: Connection, target: str, first_byte_ms: tuple[float, float]) -> None:
    try:
        asyncio.run(_Proxy(target, first_byte_ms).serve(commands))
    except EOFError:  # who has started it is gone
        os._exit(0)
