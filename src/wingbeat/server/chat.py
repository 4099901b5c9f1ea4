"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from time import time
from uuid import uuid4

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from wingbeat.errors import RequestError
from wingbeat.server.context import ServerContext
from wingbeat.server.deltas import Stream
from wingbeat.server.intake import Intake, chat_intake
from wingbeat.server.logprobs import chat_logprobs
from wingbeat.server.schema import ChatBody
from wingbeat.server.stream import CLIENT_GONE, Collected, EventStream, collect, unless_disconnected
from wingbeat.server.usage import UsageMeter
from wingbeat.server.wire import Json
from wingbeat.text.tool_calls import Parsed, ToolCall, ToolCallReader
from wingbeat.types import ChoiceDelta

JsonObject = dict[str, object]


def chat_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        """Answers a conversation."""
        model = server.model_named(body.model)
        intake = await asyncio.to_thread(chat_intake, body, server.tokenizer, server.max_model_len)
        writer = ChatWriter(server, body, intake, model)
        if body.stream:
            return EventStream(server.bridge, await _submit(server, intake, body), writer)
        answer = await unless_disconnected(http, _answer(server, intake, body, writer))
        return Response(status_code=CLIENT_GONE) if answer is None else Json(answer)

    return router


async def _submit(server: ServerContext, intake: Intake, body: ChatBody) -> Stream:
    """The accepted request; a schema that came from tools is refused in their name."""
    try:
        return await server.bridge.submit(intake.requests)
    except RequestError as error:
        if error.field != "response_format" or body.response_format is not None:
            raise
        raise RequestError("tools", error.value, error.allowed) from None


async def _answer(server: ServerContext, intake: Intake, body: ChatBody, writer: ChatWriter) -> JsonObject:
    stream = await _submit(server, intake, body)
    return writer.whole(await collect(server.bridge, stream, writer.meter))


class ChatWriter:
    """The wire form of one conversation's answer, whole or in chunks."""

    def __init__(self, server: ServerContext, body: ChatBody, intake: Intake, model: str) -> None:
        self._tokenizer, self._body = server.tokenizer, body
        (self._request,) = intake.requests
        self.meter = UsageMeter(intake.requests, with_speculation=body.return_speculation)
        self._id: JsonObject = {"id": self._request.request_id}
        self._rest: JsonObject = {"created": int(time()), "model": model}
        self._splitters = [_splitter(intake) for _ in range(self._request.params.n)]
        options = body.stream_options
        self._usage_last = body.return_speculation or (options is not None and options.include_usage)
        self._usage_always = options is not None and options.continuous_usage_stats

    # -- whole ---------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Collected]) -> JsonObject:
        answer: JsonObject = {**self._id, "object": "chat.completion", **self._rest}
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer["usage"] = self.meter.record()
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._request.prompt_token_ids
        return answer

    def _choice(self, index: int, found: Collected) -> JsonObject:
        splitter = self._splitters[index]
        first, last = splitter.feed(found.text), splitter.finish()
        text, calls = first.text + last.text, [*first.calls, *last.calls]
        message: JsonObject = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text.strip() or None
            message["tool_calls"] = [_call_record(call) for call in calls]
        choice: JsonObject = {"index": index, "message": message, "logprobs": self._logprobs(found)}
        choice |= {"finish_reason": splitter.reason(found.finish_reason), "stop_reason": found.stop_reason}
        return choice | ({"token_ids": found.token_ids} if self._body.return_token_ids else {})

    def _logprobs(self, part: Collected) -> JsonObject | None:
        return chat_logprobs(self._tokenizer, part.logprobs) if self._body.logprobs else None

    # -- chunks --------------------------------------------------------------------------------------------------

    def opening(self) -> list[JsonObject]:
        """The role of every choice."""
        chunks = [
            self._chunk(i, {"role": "assistant", "content": ""}, Collected()) for i in range(len(self._splitters))
        ]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._request.prompt_token_ids
        return chunks

    def events(self, index: int, delta: ChoiceDelta) -> list[JsonObject]:
        self.meter.add(delta)
        part, splitter = Collected(), self._splitters[index]
        part.add(delta)
        parsed = splitter.feed(delta.text)
        if delta.finish_reason is not None:
            last = splitter.finish()
            parsed = Parsed(parsed.text + last.text, parsed.calls + last.calls)
        content: JsonObject = {"content": parsed.text} if parsed.text or not parsed.calls else {}
        if parsed.calls:
            content["tool_calls"] = splitter.call_deltas(parsed.calls)
        wanted = self._usage_always or self._body.return_token_ids
        if not (parsed.text or parsed.calls or part.finish_reason or part.logprobs or (wanted and part.token_ids)):
            return []
        part.finish_reason = splitter.reason(part.finish_reason)
        return [self._chunk(index, content, part)]

    def closing(self) -> list[JsonObject]:
        if not self._usage_last:
            return []
        return [
            {**self._id, "object": "chat.completion.chunk", **self._rest, "choices": [], "usage": self.meter.record()}
        ]

    def _chunk(self, index: int, content: JsonObject, part: Collected) -> JsonObject:
        choice: JsonObject = {"index": index, "delta": content, "logprobs": None, "finish_reason": part.finish_reason}
        if part.logprobs:
            choice["logprobs"] = self._logprobs(part)
        if part.finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        chunk: JsonObject = {**self._id, "object": "chat.completion.chunk", **self._rest, "choices": [choice]}
        if self._usage_always:
            chunk["usage"] = self.meter.record()
        return chunk


class PlainText:
    """An answer without tools: all of it is text."""

    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed("")

    def reason(self, reason: str | None) -> str | None:
        return reason

    def call_deltas(self, calls: tuple[ToolCall, ...]) -> list[JsonObject]:
        return []


class Calls:
    """An answer that may hold calls of tools."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._reader = ToolCallReader(names)
        self._num_calls = 0

    def feed(self, text: str) -> Parsed:
        return self._counted(self._reader.feed(text))

    def finish(self) -> Parsed:
        return self._counted(self._reader.finish())

    def reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def call_deltas(self, calls: tuple[ToolCall, ...]) -> list[JsonObject]:
        first = self._num_calls - len(calls)
        return [{"index": first + i, **_call_record(call)} for i, call in enumerate(calls)]

    def _counted(self, parsed: Parsed) -> Parsed:
        self._num_calls += len(parsed.calls)
        # Line breaks between calls are no answer.
        return Parsed("", parsed.calls) if self._num_calls and not parsed.text.strip() else parsed


class NamedCall:
    """An answer that is the arguments of one named tool, streamed as they come."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def feed(self, text: str) -> Parsed:
        return Parsed("", (ToolCall(self._name, text),)) if text else Parsed("")

    def finish(self) -> Parsed:
        return Parsed("")

    def reason(self, reason: str | None) -> str | None:
        return reason

    def call_deltas(self, calls: tuple[ToolCall, ...]) -> list[JsonObject]:
        arguments = "".join(call.arguments for call in calls)
        if self._begun:
            return [{"index": 0, "function": {"arguments": arguments}}]
        self._begun = True
        return [{"index": 0, **_call_record(ToolCall(self._name, arguments))}]


def _splitter(intake: Intake) -> PlainText | Calls | NamedCall:
    if intake.named_tool is not None:
        return NamedCall(intake.named_tool)
    return Calls(intake.tool_names) if intake.tool_names else PlainText()


def _call_record(call: ToolCall) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
