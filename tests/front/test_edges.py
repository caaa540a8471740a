"""The front door's own edges, in this process: what it passes on byte by byte, what it does not serve, workers it cannot look at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.front import workers as watching
from kvstore.front.app import App
from kvstore.front.relay import Limits
from kvstore.front.upstream import Asked, Lost, ask
from kvstore.front.workers import Role, Worker, Workers

WAIT_S = 30.0  # for what must come; a busy machine takes its time
REFUSAL = b'HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{"error": "said"}'


class Door:
    """A front door before one worker, which refuses every key; `sent` has the heads of the requests that it was sent."""

    def __init__(self, port: int, sent: list[bytes]) -> None:
        self.sent = sent
        self._app = App(Workers([Worker(f"http://127.0.0.1:{port}", Role.BOTH)]), Limits()).asgi

    async def ask(self, method: str, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
        """The status and the JSON of its answer, as a web server would have them from it."""
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        incoming = iter([{"type": "http.request", "body": b""}])
        outgoing: list[Any] = []

        async def receive() -> Any:
            return next(incoming, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            outgoing.append(message)

        await self._app(scope, receive, send)
        return outgoing[0]["status"], json.loads(b"".join(each.get("body", b"") for each in outgoing))


async def before(use: Callable[[Door], Awaitable[None]]) -> None:
    """Call `use` with a door whose worker is there."""
    sent: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(REFUSAL)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        await asyncio.wait_for(use(Door(server.sockets[0].getsockname()[1], sent)), WAIT_S)


def test_a_key_of_any_bytes_goes_to_the_worker_which_refuses_it() -> None:
    async def use(door: Door) -> None:
        assert await door.ask("GET", "/v1/models", (b"authorization", b"Bearer cl\xc3\xa9 \xff")) == (401, {"error": "said"})
        assert b"authorization: bearer cl\xc3\xa9 \xff\r\n" in door.sent[0].lower()

    asyncio.run(before(use))


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 404)])
def test_what_is_not_served_is_said_as_openai_s_clients_expect_it(method: str, path: str, status: int) -> None:
    async def use(door: Door) -> None:
        found, body = await door.ask(method, path)
        assert (found, body["error"]["type"], door.sent) == (status, "invalid_request_error", [])
        assert body["error"]["message"].startswith(f"{method} {path} is not served here")

    asyncio.run(before(use))


def test_a_host_that_no_network_knows_is_lost() -> None:
    with pytest.raises(Lost, match="cannot be reached"):
        asyncio.run(ask("http://a..b:80", Asked("GET", "/health", {}), WAIT_S))


def test_a_worker_that_cannot_be_looked_at_is_left_out_and_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("http://127.0.0.1:9", Role.BOTH)

    async def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    async def right(*_: Any) -> Any:
        return SimpleNamespace(status=200, close=lambda: None)

    async def until(well: bool) -> None:
        async with asyncio.timeout(WAIT_S):
            while worker.well is not well:  # noqa: ASYNC110  nothing says so but the worker itself
                await asyncio.sleep(0.001)

    async def watch() -> None:
        monkeypatch.setattr(watching, "ask", broken)
        looking = asyncio.ensure_future(Workers([worker]).watch())
        await until(False)
        monkeypatch.setattr(watching, "ask", right)
        await until(True)
        looking.cancel()

    monkeypatch.setattr(watching, "LOOK_S", 0.001)
    asyncio.run(watch())
