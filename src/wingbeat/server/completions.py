"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from time import time

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from wingbeat.server.context import ServerContext
from wingbeat.server.intake import Intake, completion_intake
from wingbeat.server.logprobs import completion_logprobs
from wingbeat.server.schema import CompletionBody
from wingbeat.server.stream import CLIENT_GONE, Collected, EventStream, collect, unless_disconnected
from wingbeat.server.usage import UsageMeter
from wingbeat.server.wire import Json
from wingbeat.types import ChoiceDelta

JsonObject = dict[str, object]


def completion_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        """Continues prompts."""
        model = server.model_named(body.model)
        intake = await asyncio.to_thread(completion_intake, body, server.tokenizer, server.max_model_len)
        writer = CompletionWriter(server, body, intake, model)
        if body.stream:
            return EventStream(server.bridge, await server.bridge.submit(intake.requests), writer)
        answer = await unless_disconnected(http, _answer(server, intake, writer))
        return Response(status_code=CLIENT_GONE) if answer is None else Json(answer)

    return router


async def _answer(server: ServerContext, intake: Intake, writer: CompletionWriter) -> JsonObject:
    stream = await server.bridge.submit(intake.requests)
    return writer.whole(await collect(server.bridge, stream, writer.meter))


class CompletionWriter:
    """The wire form of one completion, whole or in chunks."""

    def __init__(self, server: ServerContext, body: CompletionBody, intake: Intake, model: str) -> None:
        self._tokenizer, self._body, self._requests = server.tokenizer, body, intake.requests
        self.meter = UsageMeter(intake.requests, with_speculation=body.return_speculation)
        first = intake.requests[0]
        self._head: JsonObject = {
            "id": first.request_id.rpartition("-")[0],
            "object": "text_completion",
            "created": int(time()),
            "model": model,
        }
        num_choices = first.params.n * len(intake.requests)
        self._offsets = [0] * num_choices
        self._prompt_sent = [False] * num_choices
        options = body.stream_options
        self._usage_last = body.return_speculation or (options is not None and options.include_usage)
        self._usage_always = options is not None and options.continuous_usage_stats

    def whole(self, choices: list[Collected]) -> JsonObject:
        written = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "choices": written, "usage": self.meter.record()}

    def opening(self) -> list[JsonObject]:
        return []

    def events(self, index: int, delta: ChoiceDelta) -> list[JsonObject]:
        self.meter.add(delta)
        wanted = self._usage_always or self._body.return_token_ids
        if not (delta.text or delta.finish_reason or delta.logprobs or (wanted and delta.token_ids)):
            return []
        part = Collected()
        part.add(delta)
        chunk: JsonObject = {**self._head, "choices": [self._choice(index, part)]}
        if self._usage_always:
            chunk["usage"] = self.meter.record()
        return [chunk]

    def closing(self) -> list[JsonObject]:
        return [{**self._head, "choices": [], "usage": self.meter.record()}] if self._usage_last else []

    def _choice(self, index: int, part: Collected) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "text": part.text,
            "logprobs": self._logprobs(index, part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if not self._prompt_sent[index]:
                self._prompt_sent[index] = True
                request = self._requests[index // self._requests[0].params.n]
                choice["prompt_token_ids"] = request.prompt_token_ids
        return choice

    def _logprobs(self, index: int, part: Collected) -> JsonObject | None:
        if self._body.logprobs is None:
            return None
        found = completion_logprobs(self._tokenizer, part.logprobs, offset=self._offsets[index])
        self._offsets[index] += sum(len(self._tokenizer.token_text(item.token_id)) for item in part.logprobs)
        return found
