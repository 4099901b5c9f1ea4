"""BodyLimit: bodies over the limit are refused with 413 and never held in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wingbeat.server.errors import BodyTooLargeError, too_large

DRAIN_BYTES = 256 * 2**20
DRAIN_SECONDS = 5.0
"""How much of a refused body is read and dropped: a client that is still sending would otherwise see a reset connection
instead of the answer."""


class BodyLimit:
    """ASGI middleware around the app; bodies are up to `max_bytes` long."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse(scope, receive, send, f"{announced} bytes")
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        """`receive` that ends the request once too many bytes have come (a chunked body announces no length)."""
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_bytes:
                await _drain(receive)
                raise BodyTooLargeError(self._message(f"over {self._max_bytes} bytes"))
            return message

        return counted

    def _message(self, size: str) -> str:
        return f"body={size} is not valid: at most {self._max_bytes} bytes (--max-body-bytes)"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, size: str) -> None:
        if Headers(scope=scope).get("expect", "").lower() != "100-continue":
            await _drain(receive)
        await too_large(self._message(size))(scope, receive, send)


async def _drain(receive: Receive) -> None:
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while dropped < DRAIN_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
