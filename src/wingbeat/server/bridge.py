"""EngineBridge: the asyncio side and the engine's thread, joined by an inbox and by one wake-up per step.

Only the engine thread touches the engine. Messages go to it through a queue; what a step brought comes back as one
batch handed to the event loop, which sorts it into the streams of the requests. A failing step ends every active
request with an error and leaves the server up: /health then says why nothing is served any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Protocol, TypeVar, cast

from wingbeat.engine.metrics import EngineInfo, EngineMetrics, SpeculationState
from wingbeat.errors import EngineError, WingbeatError
from wingbeat.server.deltas import Stream
from wingbeat.text.grammar import GrammarCompiler
from wingbeat.text.tokenizer import Tokenizer
from wingbeat.types import ChoiceDelta, Request

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineLike(Protocol):
    """What the server asks of an engine; every method is called on one thread. `grammars` may be used by any."""

    tokenizer: Tokenizer
    grammars: GrammarCompiler
    model_name: str
    max_model_len: int

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> object: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[ChoiceDelta]: ...
    def set_policy(self, spec: str) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def speculation(self) -> SpeculationState: ...
    def metrics(self) -> EngineMetrics: ...
    def info(self) -> EngineInfo: ...
    def close(self) -> None: ...


class Observer(Protocol):
    """Told about latencies as they happen, on the event loop."""

    def first_token(self, seconds: float) -> None: ...
    def more_tokens(self, seconds: float, num_tokens: int) -> None: ...
    def request_done(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    accepted: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[[EngineLike], object]
    answer: asyncio.Future[object]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Add | Abort | Call | Stop


class EngineBridge:
    """Start on a running event loop; submit, abort and call from that loop only."""

    def __init__(self, engine: EngineLike, observer: Observer | None = None) -> None:
        self.engine = engine
        self.failure: str | None = None
        """Why the engine stopped; None while it serves."""
        self._observer = observer
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._thread = Thread(target=self._run, name="wingbeat-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- event loop side -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self, timeout_s: float = 10.0) -> None:
        """Ends active requests as aborted and joins the engine's thread."""
        for request_id, stream in list(self._streams.items()):
            self._inbox.put(Abort(request_id))
            stream.fail(request_id, "the server is shutting down")
        self._streams.clear()
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def num_active(self) -> int:
        return len(self._streams)

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """One stream of all the requests, once the engine has accepted each. Raises RequestError or EngineError."""
        loop, stream = self._running_loop(), Stream(requests)
        for schema in {request.json_schema for request in requests if request.json_schema is not None}:
            # Here and not on the engine's thread, where everybody would wait for it.
            await asyncio.to_thread(self.engine.grammars.compile, schema)
        accepted: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
        for request, future in zip(requests, accepted, strict=True):
            self._streams[request.request_id] = stream
            self._send(Add(request, future))
        try:
            await asyncio.gather(*accepted)
        except BaseException:
            self.abort(stream)
            raise
        return stream

    def abort(self, stream: Stream) -> None:
        """Stops the unfinished requests of a client that has gone; nothing more is delivered to it."""
        for request_id in stream.num_open:
            if self._streams.pop(request_id, None) is not None:
                self._inbox.put(Abort(request_id))

    async def call(self, function: Callable[[EngineLike], T]) -> T:
        """Runs a short function on the engine's thread, between two steps."""
        answer: asyncio.Future[object] = self._running_loop().create_future()
        self._send(Call(cast(Callable[[EngineLike], object], function), answer))
        return cast(T, await answer)

    def _send(self, message: Add | Call) -> None:
        if self.failure is not None and isinstance(message, Add):
            message.accepted.set_exception(EngineError(f"the engine has stopped: {self.failure}"))
        else:
            self._inbox.put(message)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or not self._thread.is_alive():
            raise EngineError("the engine is not running")
        return self._loop

    def _deliver(self, deltas: list[ChoiceDelta]) -> None:
        """Sorts one step's deltas into their streams. The only wake-up of the step."""
        now = perf_counter()
        by_request: dict[str, list[ChoiceDelta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        for request_id, batch in by_request.items():
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # its client has gone
            if self._observer is not None:
                self._observe(self._observer, stream, batch, now)
            stream.push(batch)
            if stream.num_open[request_id] <= 0:
                del self._streams[request_id]

    @staticmethod
    def _observe(observer: Observer, stream: Stream, batch: list[ChoiceDelta], now: float) -> None:
        for delta in batch:
            index = stream.index_of(delta)
            last = stream.last_token_at[index]
            if delta.token_ids and not last:
                observer.first_token(now - stream.arrived)
            elif delta.token_ids:
                observer.more_tokens(now - last, len(delta.token_ids))
            if delta.token_ids:
                stream.last_token_at[index] = now
            if delta.finish_reason is not None:
                observer.request_done(now - stream.arrived)

    def _fail_all(self, reason: str) -> None:
        self.failure = reason
        for request_id, stream in list(self._streams.items()):
            stream.fail(request_id, f"the engine has stopped: {reason}")
        self._streams.clear()

    # -- engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        stopping = False
        while not stopping:
            for message in self._messages():
                stopping = isinstance(message, Stop) or stopping
                self._handle(message)
            if not stopping and self._has_work():
                self._step()
        self.engine.close()

    def _messages(self) -> list[Message]:
        """Everything in the inbox; waits for something only when the engine has nothing to do."""
        found = [] if self._has_work() else [self._inbox.get()]
        try:
            while True:
                found.append(self._inbox.get_nowait())
        except Empty:
            return found

    def _has_work(self) -> bool:
        try:
            return self.failure is None and self.engine.has_work()
        except Exception as error:
            self._stop_serving(error)
            return False

    def _handle(self, message: Message) -> None:
        if isinstance(message, Add):
            self._answer(message.accepted, lambda: self._add(message.request))
        elif isinstance(message, Call):
            self._answer(message.answer, lambda: message.function(self.engine))
        elif isinstance(message, Abort):
            self._abort(message.request_id)

    def _add(self, request: Request) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine has stopped: {self.failure}")
        try:
            self.engine.add(request)
        except WingbeatError:
            raise
        except Exception:
            self.engine.abort(request.request_id)  # in case it was half added
            raise

    def _abort(self, request_id: str) -> None:
        try:
            if self.failure is None:
                self.engine.abort(request_id)
        except Exception as error:
            self._stop_serving(error)

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except Exception as error:
            self._stop_serving(error)
            return
        if deltas:
            self._post(self._deliver, deltas)

    def _stop_serving(self, error: Exception) -> None:
        """After an unexpected error the engine's state cannot be trusted: nothing runs on it any more."""
        log.error("the engine failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        self.failure = reason
        self._post(self._fail_all, reason)

    def _answer(self, future: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            value = function()
        except WingbeatError as error:
            self._post(_set_error, future, error)
        except Exception as error:
            log.exception("a call on the engine's thread failed")
            self._post(_set_error, future, EngineError(f"{type(error).__name__}: {error}"))
        else:
            self._post(_set_value, future, value)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.info("the event loop has ended; results are dropped")


def _set_error(future: asyncio.Future[object], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _set_value(future: asyncio.Future[object], value: object) -> None:
    if not future.done():
        future.set_result(value)
