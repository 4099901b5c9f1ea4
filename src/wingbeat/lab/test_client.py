"""The client's figures against a server whose truth is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TypeVar

import aiohttp
import pytest

from wingbeat.lab.client import ChatClient, Reply, Sampling
from wingbeat.lab.mock import Behaviour, Fault, MockServer, mock_server
from wingbeat.lab.suites import Prompt

T = TypeVar("T")
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "hello"}])
SAMPLING = Sampling(max_tokens=33)


def ask(behaviour: Behaviour, body: Callable[[ChatClient, MockServer], Awaitable[T]]) -> T:
    async def run() -> T:
        async with mock_server(behaviour) as (mock, url), aiohttp.ClientSession() as session:
            return await asyncio.wait_for(body(ChatClient(session, url, "mock"), mock), 20)

    return asyncio.run(run())


def one(behaviour: Behaviour, stop_after: float | None = None) -> Reply:
    async def body(client: ChatClient, mock: MockServer) -> Reply:
        stop_at = None if stop_after is None else perf_counter() + stop_after
        return await client.chat(PROMPT, SAMPLING, 7, stop_at=stop_at)

    return ask(behaviour, body)


def test_tokens_come_from_usage_not_from_chunks() -> None:
    reply = one(Behaviour(policy="always:chain(3)", tokens_per_step=4, ttft_s=0.0, step_s=0.001))
    assert reply.num_tokens == 33
    assert reply.num_chunks == 9  # 1 + 8 steps of 4
    assert [tokens for _, tokens in reply.progress] == [1, 5, 9, 13, 17, 21, 25, 29, 33]
    assert reply.finish_reason == "length"
    assert reply.error is None


@pytest.mark.parametrize("continuous", [True, False])
def test_ttft_and_tpot_are_the_servers(continuous: bool) -> None:
    behaviour = Behaviour(
        policy="always:chain(3)", tokens_per_step=4, ttft_s=0.15, step_s=0.03, continuous_usage=continuous
    )
    reply = one(behaviour)
    assert reply.first is not None
    assert reply.last is not None
    assert reply.num_tokens == 33
    # 8 steps of 30 ms for the 32 tokens after the first.
    assert reply.first - reply.sent == pytest.approx(0.15, abs=0.06)
    assert (reply.last - reply.first) / 32 == pytest.approx(8 * 0.03 / 32, rel=0.3)


def test_the_last_chunk_with_text_ends_the_request_not_the_usage_chunk() -> None:
    reply = one(Behaviour(ttft_s=0.0, step_s=0.001, continuous_usage=False))
    assert reply.num_chunks == 33


def test_speculation_counts_are_kept() -> None:
    use = one(Behaviour(policy="always:chain(3)", tokens_per_step=4, ttft_s=0.0, step_s=0.001)).speculation
    assert use is not None
    assert (use.num_target_forwards, use.num_draft_steps, use.num_accepted_drafts) == (9, 8, 24)
    assert use.accepted_per_pos == (8, 8, 8)
    assert use.drafted_per_pos == (8, 8, 8)


def test_missing_usage_leaves_the_count_unknown() -> None:
    reply = one(Behaviour(fault="missing_usage", ttft_s=0.0, step_s=0.001))
    assert reply.num_tokens is None
    assert reply.num_chunks == 33
    assert reply.error is None


@pytest.mark.parametrize(
    ("fault", "words"),
    [("http_500", "HTTP 500"), ("disconnect", ""), ("error_event", "the engine failed"), ("no_done", "without [DONE]")],
)
def test_faults_become_errors(fault: Fault, words: str) -> None:
    reply = one(Behaviour(fault=fault, ttft_s=0.0, step_s=0.001))
    assert reply.error is not None
    assert words in reply.error


def test_a_cut_request_keeps_what_came() -> None:
    reply = one(Behaviour(ttft_s=0.0, step_s=0.05), stop_after=0.32)
    assert reply.cut
    assert reply.error is None
    assert reply.num_tokens is not None
    assert 2 <= reply.num_tokens <= 10


def test_a_cut_request_stops_on_the_server_too() -> None:
    async def body(client: ChatClient, mock: MockServer) -> int:
        await client.chat(PROMPT, SAMPLING, 7, stop_at=perf_counter() + 0.1)
        await asyncio.sleep(0.3)
        return mock.seen.running

    assert ask(Behaviour(ttft_s=0.0, step_s=0.05), body) == 0


def test_everything_that_decides_the_answer_is_sent() -> None:
    async def body(client: ChatClient, mock: MockServer) -> dict[str, object]:
        await client.chat(PROMPT, Sampling(max_tokens=2, temperature=0.7, top_p=0.9, ignore_eos=True), 11)
        return mock.seen.bodies[0]

    sent = ask(Behaviour(ttft_s=0.0), body)
    wanted = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True, "seed": 11, "stream": True}
    assert sent.items() >= wanted.items()
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_the_first_text_counts_not_the_role_chunk() -> None:
    reply = one(Behaviour(ttft_s=0.1, step_s=0.001))
    assert reply.first is not None
    assert reply.first - reply.sent >= 0.09
