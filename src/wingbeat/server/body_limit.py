"""BodyLimit: bodies over the limit are refused with 413 and never held in memory."""

from __future__ import annotations

from time import monotonic

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wingbeat.server.errors import error_response

DRAIN_BYTES = 256 * 2**20
DRAIN_SECONDS = 5.0
"""How much of a refused body is read and dropped: a client that is still sending would otherwise see a reset connection
instead of the answer."""


class _TooLargeError(Exception):
    """The body turned out to be over the limit while it was read."""


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
        try:
            await self._app(scope, self._counting(receive), send)
        except _TooLargeError:
            await self._refuse(scope, receive, send, f"more than {self._max_bytes} bytes")

    def _counting(self, receive: Receive) -> Receive:
        """`receive` that raises once too many bytes have come."""
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_bytes:
                raise _TooLargeError
            return message

        return counted

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, size: str) -> None:
        if Headers(scope=scope).get("expect", "").lower() != "100-continue":
            await _drain(receive)
        response = error_response(
            413,
            f"body={size} is not valid: at most {self._max_bytes} bytes (--max-body-bytes)",
            param="body",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        await response(scope, receive, send)


async def _drain(receive: Receive) -> None:
    dropped, deadline = 0, monotonic() + DRAIN_SECONDS
    while dropped < DRAIN_BYTES and monotonic() < deadline:
        message = await receive()
        dropped += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
