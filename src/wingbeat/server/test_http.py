"""Over a real socket: the official client, clients that leave, bodies too large, many streams at once, shutdown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from wingbeat.server.app import ServerOptions, build_app
from wingbeat.server.test_fake import FakeEngine

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TIMEOUT_S = 10.0


@contextmanager
def serving(engine: FakeEngine, options: ServerOptions | None = None) -> Iterator[str]:
    """The base URL of a server over `engine` on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(engine, options), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        listener.close()
    assert not thread.is_alive(), "the server did not stop"


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def client_of(url: str, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeEngine(), ServerOptions(api_keys=("secret",))) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url, "secret") as found:
        yield found


def test_official_client_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=HELLO, n=2)
    assert [choice.message.content for choice in whole.choices] == ["Hello world"] * 2
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    text = client.completions.create(model="fake", prompt="x", max_tokens=4).choices[0].text
    assert text == "Hell"
    assert client.models.list().data[0].id == "fake"


def test_official_client_parses_a_schema_and_extra_fields(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    schema["additionalProperties"] = False
    answer = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        extra_body={"return_speculation": True, "max_draft_depth": 0},
    )
    assert json.loads(answer.choices[0].message.content or "") == {"x": ""}
    assert answer.usage is not None and answer.usage.model_dump()["speculation"]["accept_len"] > 0


def test_official_client_raises_what_we_mean(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client_of(url).models.list()


def test_tools_with_the_official_client() -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with serving(FakeEngine('<tool_call>{"name": "look", "arguments": {}}</tool_call>')) as url:
        answer = client_of(url).chat.completions.create(model="fake", messages=HELLO, tools=[tool])
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "look" and answer.choices[0].finish_reason == "tool_calls"


def test_a_50_mb_body_is_refused_and_the_server_goes_on(client: openai.OpenAI, url: str) -> None:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    body = b'{"prompt": "' + b"x" * 50_000_000 + b'"}'
    response = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == 413
    assert "50000014 bytes" in response.json()["error"]["message"]
    assert client.completions.create(model="fake", prompt="x").choices[0].text == "Hello world"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_work(stream: bool) -> None:
    engine = FakeEngine("x" * 400, delay_s=0.02, tokens_per_step=1)
    with serving(engine) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        body = {"prompt": ["a", "b"], "max_tokens": 400, "stream": stream}
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.2)
        wait_until(lambda: len(engine.aborted) == 2)
        assert engine.num_steps < 400 and not engine.has_work()
        assert httpx.get(f"{url}/health").json()["active_requests"] == 0


def test_many_streams_share_steps() -> None:
    """32 streams advance together: their number of steps is that of one or two, and one thread drives the engine."""
    engine = FakeEngine("y" * 60, delay_s=0.01)
    said: list[str] = []

    def one(url: str) -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 60}, timeout=TIMEOUT_S
        ) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        said.append("".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]))

    with serving(engine) as url:
        threads = [threading.Thread(target=one, args=(url,)) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert said == ["y" * 60] * 32
    assert len(engine.threads) == 1 and engine.num_steps < 32 * 30 / 2


def test_shutdown_ends_running_requests() -> None:
    engine = FakeEngine("z" * 400, delay_s=0.05, tokens_per_step=1)
    ended: list[object] = []

    def one(url: str) -> None:
        try:
            ended.append(
                httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 400}, timeout=TIMEOUT_S)
            )
        except httpx.HTTPError as error:
            ended.append(error)

    with serving(engine) as url:
        thread = threading.Thread(target=one, args=(url,))
        thread.start()
        wait_until(lambda: engine.num_steps > 2)
    thread.join(TIMEOUT_S)
    assert ended and engine.num_steps < 100
