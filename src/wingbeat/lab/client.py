"""A streaming chat client that times every chunk and counts tokens only from the server's `usage`.

Under speculation one chunk carries several tokens, so a chunk is never counted as a token here, not even as a fallback.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

from wingbeat.lab.record import SpeculationUse
from wingbeat.lab.suites import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Always sent in full: a server's default must not decide a benchmark."""

    max_tokens: int = 96
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False


@dataclass(slots=True, kw_only=True)
class Reply:
    """What one request gave, on the clock of `perf_counter`."""

    sent: float
    first: float | None = None
    last: float | None = None
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_chunks: int = 0
    progress: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    finish_reason: str | None = None
    text_sha: str = ""
    cut: bool = False
    error: str | None = None
    speculation: SpeculationUse | None = None


class ChatClient:
    """Requests to one OpenAI-compatible server over one connection pool."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, *, speculation: bool = True) -> None:
        self._session, self.model = session, model
        self._endpoint = url.rstrip("/") + "/v1/chat/completions"
        self._speculation = speculation

    async def chat(
        self, prompt: Prompt, sampling: Sampling, seed: int, *, stop_at: float | None = None, salt: str | None = None
    ) -> Reply:
        """One streamed answer. After `stop_at` the request is cut: what came until then counts, nothing is awaited."""
        body = self._body(prompt, sampling, seed, salt)
        reply = Reply(sent=perf_counter())
        try:
            async with asyncio.timeout_at(_loop_time(stop_at)):
                await self._stream(body, reply)
        except TimeoutError:
            reply.cut = True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:300]
        return reply

    def _body(self, prompt: Prompt, sampling: Sampling, seed: int, salt: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        optional = {
            "tools": prompt.tools,
            "ignore_eos": sampling.ignore_eos or None,
            "return_speculation": self._speculation or None,
            "cache_salt": salt,
        }
        return body | {key: value for key, value in optional.items() if value is not None}

    async def _stream(self, body: dict[str, Any], reply: Reply) -> None:
        text = hashlib.sha256()
        async with self._session.post(self._endpoint, json=body) as response:
            if response.status != 200:
                reply.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            ended = False
            async for event in _events(response):
                if event == b"[DONE]":
                    ended = True
                    break
                _take(json.loads(event), perf_counter(), reply, text)
        reply.text_sha = text.hexdigest()[:16]
        if not ended:
            reply.error = "the stream ended without [DONE]"


def _loop_time(stop_at: float | None) -> float | None:
    """The event loop's time for a perf_counter time."""
    return None if stop_at is None else asyncio.get_running_loop().time() + (stop_at - perf_counter())


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Payloads of server-sent events."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _take(chunk: dict[str, Any], at: float, reply: Reply, text: Any) -> None:
    """Folds one chunk into the reply."""
    if "error" in chunk:
        raise ValueError(f"error in the stream: {chunk['error']}")
    carried = False
    for choice in chunk.get("choices") or []:
        piece = _content(choice)
        if piece:
            text.update(piece.encode())
            carried = True
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    usage = chunk.get("usage")
    tokens = usage.get("completion_tokens") if usage else None
    # A token may carry no text yet (half a character): a rise of the count is as good as text.
    if tokens is not None and chunk.get("choices") and tokens > (reply.progress[-1][1] if reply.progress else 0):
        reply.progress.append((at, tokens))
        carried = True
    if carried:
        reply.num_chunks += 1
        reply.first = at if reply.first is None else reply.first
        reply.last = at
    if usage:
        _take_usage(usage, reply)


def _content(choice: dict[str, Any]) -> str:
    """Text of any kind in a chunk: answer, reasoning, tool call."""
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls")
    parts = (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"))
    return "".join(part for part in parts if part) + (json.dumps(calls) if calls else "")


def _take_usage(usage: dict[str, Any], reply: Reply) -> None:
    reply.num_tokens = usage.get("completion_tokens", reply.num_tokens)
    reply.num_prompt_tokens = usage.get("prompt_tokens", reply.num_prompt_tokens)
    details = usage.get("prompt_tokens_details")
    if details and details.get("cached_tokens") is not None:
        reply.num_cached_tokens = details["cached_tokens"]
    use = usage.get("speculation")
    if use:
        reply.speculation = SpeculationUse(
            num_tokens=reply.num_tokens or 0,
            num_target_forwards=use.get("num_target_forwards", 0),
            num_draft_steps=use.get("num_draft_steps", 0),
            num_draft_tokens=use.get("num_draft_tokens", 0),
            num_accepted_drafts=use.get("num_accepted_drafts", 0),
            accepted_per_pos=tuple(use.get("accepted_per_pos", ())),
            drafted_per_pos=tuple(use.get("drafted_per_pos", ())),
        )
