"""Refusals: every wrong request gets a 4xx of OpenAI's shape that names the field, the value and what is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from wingbeat.server.app import ServerOptions
from wingbeat.server.test_api import HELLO, TOOLS, served
from wingbeat.server.test_fake import FakeEngine
from wingbeat.text.tokenizer import Tokenizer

BAD_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"$defs": 5, "type": "objec"}}}]
CALL_NAME = "messages[0].tool_calls[0].function.name"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def refused(method: str, path: str, options: ServerOptions | None = None, **request: Any) -> tuple[int, dict[str, Any]]:
    async def work(client: httpx.AsyncClient) -> httpx.Response:
        response = await client.request(method, path, **request)
        assert (await client.get("/health")).status_code == 200
        return response

    engine = FakeEngine()
    response = served(engine, work, options)
    assert not engine.requests or engine.aborted
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code, response.json()["error"]


async def until(true: Callable[[], bool]) -> None:
    """Waits for another thread to make it so; the caller's timeout ends it."""
    while not true():  # noqa: ASYNC110 - a thread cannot set an asyncio.Event
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": -1}, "temperature", "temperature=-1.0 is not valid: a number from 0 to 100"),
        ({"temperature": "hot"}, "temperature", "temperature='hot'"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 is not valid: an integer >= 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0"),
        ({"n": 1000}, "n", "from 1 to 128"),
        ({"n": 0}, "n", "n=0 is not valid: an integer from 1 to 128"),
        ({"top_p": 0}, "top_p", "top_p=0"),
        ({"top_k": 2**40}, "top_k", "at most"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": 5}, "stop", "stop=5"),
        ({"stop": ["a", 5]}, "stop", "stop=['a', 5] is not valid"),
        ({"stop": ["a"] * 17}, "stop", "up to 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"1": 1000}}, "logit_bias", "-100 to 100"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "from 0 to 20"),
        ({"messages": []}, "messages", "1 to"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role", "expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
        ({"best_of": 3}, "best_of", "use n"),
        ({"audio": {"voice": "x"}}, "audio", "gives text"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"guided_regex": "a+"}, "guided_regex", "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "look"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "tool_choice to none"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is required"),
        ({"tools": BAD_TOOLS, "tool_choice": "required"}, "tools", "llguidance"),
        ({"tools": TOOLS, "messages": [{"role": "assistant", "tool_calls": [5]}]}, CALL_NAME, "expected a string"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt='' is not valid: String should have at least 1 character"),
        ({"cache_salt": 7}, "cache_salt", "cache_salt=7 is not valid"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias", "token ids as keys"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
            "response_format",
            "llguidance",
        ),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, said: str) -> None:
    for extra in ({}, {"stream": True} if "stream_options" not in fields else {}):
        status, error = refused("POST", CHAT, json={"messages": HELLO, **fields, **extra})
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"logprobs": 21}, "logprobs"), ({"prompt": []}, "prompt")],
)
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any], param: str) -> None:
    status, error = refused("POST", COMPLETIONS, json={"prompt": "a", **fields})
    assert (status, error["param"]) == (400, param)


def test_missing_and_mistyped_bodies() -> None:
    assert refused("POST", COMPLETIONS, json={})[1]["message"] == "prompt is required"
    assert "JSON object" in refused("POST", COMPLETIONS, json=[1])[1]["message"]
    assert "JSON object" in refused("POST", COMPLETIONS, content=b"")[1]["message"]
    status, error = refused("POST", COMPLETIONS, content=b'{"prompt": ', headers={"Content-Type": "application/json"})
    assert status == 400 and "not valid JSON" in error["message"]
    for content in (b'{"prompt": "\xff"}', b"[" * 100_000):
        status, error = refused("POST", COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        assert status == 400 and "not valid JSON" in error["message"] and "UTF-8" in error["message"]


def test_nonsense_numbers_are_refused() -> None:
    body = '{"prompt": "a", "temperature": NaN}'
    status, error = refused("POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert (status, error["param"]) == (400, "temperature")


def test_a_prompt_longer_than_the_context() -> None:
    status, error = refused("POST", COMPLETIONS, json={"prompt": "x" * 600})
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert "600 tokens" in error["message"] and "499" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {"prompt": "x" * 400_000}), (CHAT, {"messages": [{"role": "user", "content": "x" * 400_000}]})],
)
def test_a_text_that_cannot_fit_is_not_even_tokenised(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    status, error = refused("POST", path, json=fields)
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert "characters" in error["message"] and "499 tokens" in error["message"]


def test_one_bad_prompt_of_many_starts_none() -> None:
    status, error = refused("POST", COMPLETIONS, json={"prompt": ["ok", "x" * 600]})
    assert (status, error["param"]) == (400, "prompt")


def test_unknown_models_and_paths() -> None:
    status, error = refused("POST", CHAT, json={"messages": HELLO, "model": "gpt-4"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "fake" in error["message"]
    assert refused("GET", "/v1/nothing")[0] == 404
    assert refused("GET", "/v1/models/other")[0] == 404
    assert refused("GET", CHAT)[0] == 405


def test_bodies_over_the_limit_with_and_without_a_length() -> None:
    options, content = ServerOptions(max_body_bytes=1000), json.dumps({"prompt": "x" * 2000}).encode()

    async def chunks() -> Any:
        for i in range(0, len(content), 100):
            yield content[i : i + 100]

    headers = {"Content-Type": "application/json"}
    for body in (content, chunks()):
        status, error = refused("POST", COMPLETIONS, options, content=body, headers=headers)
        assert (status, error["param"], error["code"]) == (413, "body", "request_too_large")
        assert error["message"].startswith("body=") and "at most 1000 bytes" in error["message"]


def test_keys_guard_everything_but_health() -> None:
    options = ServerOptions(api_keys=("one", "two"))

    async def work(client: httpx.AsyncClient) -> list[int]:
        async def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": key}
            return (await client.get(path, headers=headers)).status_code

        return [
            await status("/v1/models", None),
            await status("/v1/models", "Bearer three"),
            await status("/v1/models", "one"),
            await status("/v1/models", "Bearer two"),
            await status("/metrics", None),
            await status("/health", None),
        ]

    assert served(FakeEngine(), work, options) == [401, 401, 401, 200, 401, 200]


def test_unknown_fields_are_ignored() -> None:
    async def work(client: httpx.AsyncClient) -> int:
        return (await client.post(COMPLETIONS, json={"prompt": "a", "best_of": 1, "echo": False, "x_y": 1})).status_code

    assert served(FakeEngine(), work) == 200


def test_a_failing_engine_ends_every_request_and_says_so() -> None:
    engine = FakeEngine("abcdefgh" * 30, delay_s=0.01)

    async def work(client: httpx.AsyncClient) -> tuple[httpx.Response, ...]:
        body = {"prompt": "a", "max_tokens": 400}
        whole = asyncio.create_task(client.post(COMPLETIONS, json=body))
        streamed = asyncio.create_task(client.post(COMPLETIONS, json={**body, "stream": True}))
        await until(lambda: engine.num_steps >= 3)
        engine.break_with = RuntimeError("out of luck")
        return (
            *(await asyncio.gather(whole, streamed)),
            await client.get("/health"),
            await client.post(COMPLETIONS, json=body),
        )

    whole, streamed, health, later = served(engine, work)
    assert whole.status_code == 503 and "out of luck" in whole.json()["error"]["message"]
    last, done = streamed.text.strip().split("\n\n")[-2:]
    assert "out of luck" in json.loads(last.removeprefix("data: "))["error"]["message"] and done == "data: [DONE]"
    assert health.status_code == 503 and "out of luck" in health.json()["error"]
    assert later.status_code == 503


def test_an_engine_that_cannot_say_whether_it_has_work_fails_aloud() -> None:
    engine = FakeEngine("abcdefgh" * 30, delay_s=0.01)

    def broken() -> bool:
        raise RuntimeError("lost count")

    async def work(client: httpx.AsyncClient) -> list[int]:
        running = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 400}))
        await until(lambda: engine.num_steps >= 3)
        engine.has_work = broken
        return [(await running).status_code, (await client.get("/health")).status_code]

    assert served(engine, work) == [503, 503]


def test_an_unexpected_error_while_adding_fails_that_request_only() -> None:
    engine = FakeEngine()
    add = engine.add

    def failing(request: Any) -> None:
        if len(request.prompt_token_ids) == 3:
            raise ZeroDivisionError("oops")
        add(request)

    engine.add = failing

    async def work(client: httpx.AsyncClient) -> list[int]:
        prompts = ([1, 2, 3], [1, 2])
        return [(await client.post(COMPLETIONS, json={"prompt": p})).status_code for p in prompts]

    assert served(engine, work) == [503, 200]


def test_halves_of_surrogate_pairs_become_replacement_characters() -> None:
    engine = FakeEngine()

    async def work(client: httpx.AsyncClient) -> list[int]:
        bodies = (
            (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
            (COMPLETIONS, b'{"prompt": "\\udc00"}'),
        )
        headers = {"Content-Type": "application/json"}
        return [(await client.post(path, content=body, headers=headers)).status_code for path, body in bodies]

    assert served(engine, work) == [200, 200]
    assert [engine.tokenizer.decode(r.prompt_token_ids).count("\ufffd") for r in engine.requests] == [1, 1]
