"""What happens to a request's deltas: server-sent events as they come, or one answer at the end. Work is cancelled when
the client goes away, in both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from wingbeat.errors import EngineError
from wingbeat.server.bridge import EngineBridge
from wingbeat.server.deltas import Stream
from wingbeat.server.errors import error_body
from wingbeat.server.wire import json_bytes
from wingbeat.types import ChoiceDelta, TokenLogprob

T = TypeVar("T")
JsonObject = dict[str, object]
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""Status of an answer that nobody is there to read."""


class Writer(Protocol):
    """Turns deltas into the events of one API."""

    def opening(self) -> list[JsonObject]:
        """Events before the first token."""
        ...

    def events(self, index: int, delta: ChoiceDelta) -> list[JsonObject]:
        """Events of one delta of choice `index`."""
        ...

    def closing(self) -> list[JsonObject]:
        """Events after the last choice has ended."""
        ...


class EventStream(StreamingResponse):
    """Server-sent events of an accepted request; however it ends, the engine stops working on it."""

    def __init__(self, bridge: EngineBridge, stream: Stream, writer: Writer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_sse(stream, writer), media_type="text/event-stream", headers=headers)
        self._bridge, self._stream = bridge, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._bridge.abort(self._stream)


async def _sse(stream: Stream, writer: Writer) -> AsyncIterator[bytes]:
    yield _framed(writer.opening())
    async for batch in stream:
        failed = next((delta.error for delta in batch if delta.error is not None), None)
        events = [event for delta in batch for event in writer.events(stream.index_of(delta), delta)]
        if failed is not None:
            yield _framed([*events, dict(error_body(500, failed, code="engine_error"))]) + DONE
            return
        if events:
            yield _framed(events)
    yield _framed(writer.closing()) + DONE


def _framed(events: list[JsonObject]) -> bytes:
    return b"".join([b"data: " + json_bytes(event) + b"\n\n" for event in events])


@dataclass(slots=True)
class Collected:
    """One finished choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Meter(Protocol):
    def add(self, delta: ChoiceDelta) -> None: ...


async def collect(bridge: EngineBridge, stream: Stream, meter: Meter) -> list[Collected]:
    """All choices, once they have ended. Raises EngineError if one failed."""
    choices = [Collected() for _ in stream.last_token_at]
    try:
        async for batch in stream:
            for delta in batch:
                if delta.error is not None:
                    raise EngineError(delta.error)
                meter.add(delta)
                choices[stream.index_of(delta)].add(delta)
    finally:
        bridge.abort(stream)
    return choices


async def unless_disconnected(http: HttpRequest, work: Coroutine[object, object, T]) -> T | None:
    """The work's result, or None (and the work cancelled) when the client goes first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
