"""A chat server with known behaviour: what the client measures against it can be compared with the truth.

It answers after a known delay, with known tokens per chunk at a known pace, counts like a real server, and breaks on
request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

Fault = Literal["none", "missing_usage", "http_500", "disconnect", "error_event", "no_done"]


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """What the mock does; may be changed while it runs."""

    ttft_s: float = 0.05
    step_s: float = 0.01
    """Time per target forward."""
    tokens_per_step: int = 4
    """Accepted drafts and the bonus token, all in one chunk, while speculating; 1 while off."""
    max_running: int = 1_000
    """Further requests wait: makes throughput stop rising."""
    num_tokens: int | None = None
    """Length of the answers; None is `max_tokens`."""
    num_prompt_tokens: int = 20
    num_cached_tokens: int = 16
    policy: str | None = "off"
    """None: a server without /v1/speculation."""
    fault: Fault = "none"
    fault_every: int = 1
    """The fault strikes every n-th request."""
    continuous_usage: bool = True


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the mock was asked."""

    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    policies: list[str] = field(default_factory=list[str])
    resets: int = 0
    running: int = 0
    tokens: int = 0
    accepted: int = 0
    forwards: int = 0


class MockServer:
    """The handlers and counters of one mock."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.seen = Seen()
        self._room = asyncio.Semaphore(behaviour.max_running)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/server_info", self._info),
                web.get("/v1/speculation", self._policy),
                web.post("/v1/speculation", self._set_policy),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _info(self, request: web.Request) -> web.Response:
        config = {"max_num_seqs": "32", "policy": self.behaviour.policy}
        return web.json_response(
            {"version": "mock-1", "target_digest": "abc", "drafter_digest": "def", "config": config}
        )

    async def _policy(self, request: web.Request) -> web.Response:
        if self.behaviour.policy is None:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        depth = self.tokens_per_step - 1
        page = {"policy": self.behaviour.policy, "depth": depth, "rows": 1 + depth, "num_running": self.seen.running}
        return web.json_response(page)

    async def _set_policy(self, request: web.Request) -> web.Response:
        policy = (await request.json())["policy"]
        if self.behaviour.policy is None or policy.split(":")[0] not in ("off", "always", "threshold", "table", "auto"):
            return web.json_response({"error": {"message": f"policy={policy!r} is not valid"}}, status=400)
        self.behaviour.policy = policy
        self.seen.policies.append(policy)
        return await self._policy(request)

    async def _reset(self, request: web.Request) -> web.Response:
        self.seen.resets += 1
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.Response:
        seen = self.seen
        lines = [
            "# TYPE wingbeat:generation_tokens_total counter",
            f'wingbeat:generation_tokens_total{{model_name="mock"}} {seen.tokens}',
            f"wingbeat:target_forwards_total {seen.forwards}",
            f"wingbeat:spec_decode_num_accepted_tokens_total {seen.accepted}",
            f'wingbeat:step_time_seconds_total{{part="draft"}} {0.25 * seen.forwards * self.behaviour.step_s}',
            f'wingbeat:step_time_seconds_total{{part="verify"}} {0.75 * seen.forwards * self.behaviour.step_s}',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    @property
    def tokens_per_step(self) -> int:
        speculating = self.behaviour.policy not in (None, "off")
        return self.behaviour.tokens_per_step if speculating else 1

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.bodies.append(body)
        fault = self._fault()
        if fault == "http_500":
            return web.json_response({"error": {"message": "broken on request"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.seen.running += 1
        try:
            async with self._room:
                await self._answer(request, response, body, fault)
        finally:
            self.seen.running -= 1
        return response

    def _fault(self) -> Fault:
        return self.behaviour.fault if len(self.seen.bodies) % self.behaviour.fault_every == 0 else "none"

    async def _answer(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], fault: Fault
    ) -> None:
        total = self.behaviour.num_tokens or int(body["max_tokens"])
        await _send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        loop = asyncio.get_running_loop()
        due, sent, steps = loop.time() + self.behaviour.ttft_s, 0, 0
        while sent < total:
            # Absolute times: a late wake-up must not add up, or the truth would drift.
            await asyncio.sleep(max(due - loop.time(), 0.0))
            step = 1 if sent == 0 else min(self.tokens_per_step, total - sent)
            sent, steps, due = sent + step, steps + 1, due + self.behaviour.step_s
            self._count(step)
            if fault == "disconnect" and sent > total // 2:
                if request.transport is not None:
                    request.transport.close()
                return
            if fault == "error_event" and sent > total // 2:
                await _send(response, {"error": {"message": "the engine failed"}})
                return
            await _send(response, self._chunk(body, sent, step, total, steps, fault))
        await self._finish(response, body, total, steps, fault)

    def _count(self, step: int) -> None:
        self.seen.tokens += step
        self.seen.accepted += step - 1
        self.seen.forwards += 1

    def _chunk(
        self, body: dict[str, Any], sent: int, step: int, total: int, steps: int, fault: Fault
    ) -> dict[str, Any]:
        reason = "length" if sent == total else None
        chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "x " * step}, "finish_reason": reason}]}
        wanted = body.get("stream_options", {}).get("continuous_usage_stats")
        if wanted and self.behaviour.continuous_usage and fault != "missing_usage":
            chunk["usage"] = self._usage(body, sent, steps)
        return chunk

    async def _finish(
        self, response: web.StreamResponse, body: dict[str, Any], total: int, steps: int, fault: Fault
    ) -> None:
        if fault != "missing_usage":
            await _send(response, {"choices": [], "usage": self._usage(body, total, steps)})
        if fault != "no_done":
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _usage(self, body: dict[str, Any], tokens: int, steps: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.behaviour.num_prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.behaviour.num_prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self.behaviour.num_cached_tokens},
        }
        if body.get("return_speculation"):
            usage["speculation"] = _speculation(tokens, steps, self.tokens_per_step - 1)
        return usage


def _speculation(tokens: int, steps: int, depth: int) -> dict[str, Any]:
    """Counts of an answer whose every step but the first accepted all its drafts (the last may be cut short)."""
    accepted = tokens - steps
    full, rest = divmod(accepted, depth) if depth else (0, 0)
    drafts = steps - 1 if depth else 0
    return {
        "num_target_forwards": steps,
        "num_draft_steps": drafts,
        "num_draft_tokens": drafts * depth,
        "num_accepted_drafts": accepted,
        "accepted_per_pos": [full + (i < rest) for i in range(depth)],
        "drafted_per_pos": [drafts] * depth,
        "accept_len": tokens / steps,
    }


async def _send(response: web.StreamResponse, payload: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")


@asynccontextmanager
async def mock_server(behaviour: Behaviour | None = None) -> AsyncIterator[tuple[MockServer, str]]:
    """(the mock, its URL) on a free port of this machine; closed at the end."""
    mock = MockServer(behaviour or Behaviour())
    runner = web.AppRunner(mock.app(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield mock, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
