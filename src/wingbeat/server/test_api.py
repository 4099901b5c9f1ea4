"""The two completion APIs through ASGI: whole and streamed answers agree, fields are honoured, shapes are OpenAI's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest

from wingbeat.server.app import ServerOptions, build_app
from wingbeat.server.logprobs import completion_logprobs
from wingbeat.server.test_fake import FakeEngine
from wingbeat.text.grammar import Grammar, GrammarCompiler
from wingbeat.types import TokenLogprob

T = TypeVar("T")
Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '{"name": "look", "arguments": {"at": "x"}}'


def served(
    engine: FakeEngine, work: Callable[[httpx.AsyncClient], Awaitable[T]], options: ServerOptions | None = None
) -> T:
    """Runs `work` with a client of an app over `engine`."""

    async def run() -> T:
        app = build_app(engine, options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as client,
        ):
            return await asyncio.wait_for(work(client), 20)

    return asyncio.run(run())


def post(engine: FakeEngine, path: str, body: Json) -> Json:
    async def work(client: httpx.AsyncClient) -> Json:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return served(engine, work)


def events(engine: FakeEngine, path: str, body: Json) -> list[Json]:
    """The chunks of a stream, whose end is checked."""

    async def work(client: httpx.AsyncClient) -> list[Json]:
        response = await client.post(path, json={**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    return served(engine, work)


def chat(engine: FakeEngine, **fields: Any) -> Json:
    return post(engine, "/v1/chat/completions", {"messages": HELLO, **fields})


def chat_events(engine: FakeEngine, **fields: Any) -> list[Json]:
    return events(engine, "/v1/chat/completions", {"messages": HELLO, **fields})


def complete(engine: FakeEngine, prompt: object = "ab", **fields: Any) -> Json:
    return post(engine, "/v1/completions", {"prompt": prompt, **fields})


# -- chat ---------------------------------------------------------------------------------------------------------


def test_chat_answers_with_message_and_usage() -> None:
    engine = FakeEngine()
    answer = chat(engine)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion" and answer["model"] == "fake"
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert prompt == "<user>hi\n<assistant>"
    assert answer["usage"]["prompt_tokens"] == len(prompt) and answer["usage"]["completion_tokens"] == 12
    assert engine.requests[0].params.max_tokens is None


def test_chat_streams_role_text_finish_and_usage_in_order() -> None:
    chunks = chat_events(FakeEngine(), stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "Hello world"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chat_events(FakeEngine()))


def test_continuous_usage_counts_tokens_not_chunks() -> None:
    chunks = chat_events(FakeEngine(), stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 2, 4, 6, 8, 10, 12, 12]


def test_n_choices_stream_side_by_side() -> None:
    chunks = chat_events(FakeEngine("abcd"), n=3)
    said = dict.fromkeys(range(3), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        said[choice["index"]] += choice["delta"].get("content", "")
    assert said == dict.fromkeys(range(3), "abcd")
    assert [c["message"]["content"] for c in chat(FakeEngine("abcd"), n=3)["choices"]] == ["abcd"] * 3


def test_chat_logprobs() -> None:
    content = chat(FakeEngine("\u00e9"), logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -1.0 and content[0]["top_logprobs"][0]["token"] == "<eos>"
    streamed = chat_events(FakeEngine("ab"), logprobs=True)
    entries = [e for c in streamed for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == ["ab", "<eos>"]


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    chat(
        engine,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        stop="zz",
        stop_token_ids=[3],
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        min_tokens=1,
        ignore_eos=True,
        logit_bias={"5": -3},
        max_completion_tokens=4,
        max_draft_depth=0,
        user="me",
    )
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.1, 7)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("zz",), (3,), {5: -3.0})
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.min_tokens, params.max_tokens, params.max_draft_depth, params.ignore_eos) == (1, 4, 0, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_salt_reaches_the_engine(path: str) -> None:
    for fields, expected in (({"cache_salt": "pepper"}, "pepper"), ({"cache_salt": None}, None), ({}, None)):
        engine = FakeEngine()
        post(engine, path, {"messages": HELLO, "prompt": "ab", **fields})
        assert engine.requests[0].cache_salt == expected


def test_null_means_the_default() -> None:
    engine = FakeEngine()
    chat(engine, temperature=None, stop=None, tools=None, n=None, logit_bias=None, response_format=None)
    assert engine.requests[0].params.temperature == 1.0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_speculation_and_token_ids_on_request(path: str) -> None:
    body = {"messages": HELLO, "prompt": "ab", "return_speculation": True, "return_token_ids": True, "n": 2}
    body["max_tokens"] = 4
    answer = post(FakeEngine("wxyz"), path, body)
    found = answer["usage"]["speculation"]
    assert found["num_output_tokens"] == 8 and found["accept_len"] == 2.0
    assert found["accepted_per_pos"] == [4, 2] and found["num_accepted_drafts"] == 4
    ids = FakeEngine().tokenizer.encode("wxyz")
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids]
    chunks = events(FakeEngine("wxyz"), path, body)
    assert chunks[-1]["usage"]["speculation"] == found
    assert [t for c in chunks for ch in c["choices"] if ch["index"] == 1 for t in ch["token_ids"]] == ids


# -- completions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [[256]]), (["ab", "bc"], [[256], [257]]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_all_forms_of_prompts(prompt: object, expected: list[list[int]]) -> None:
    engine = FakeEngine("ok")
    answer = complete(engine, prompt, n=2)
    assert [list(request.prompt_token_ids) for request in engine.requests] == expected
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, "ok") for i in range(2 * len(expected))]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_completions_stream_equals_whole() -> None:
    chunks = events(FakeEngine(), "/v1/completions", {"prompt": ["a", "b"], "stream_options": {"include_usage": True}})
    whole = complete(FakeEngine(), ["a", "b"])
    for index in (0, 1):
        said = "".join(ch["text"] for c in chunks for ch in c["choices"] if ch["index"] == index)
        assert said == whole["choices"][index]["text"] == "Hello world"
    assert chunks[-1]["usage"] == whole["usage"]


def test_completion_logprobs_and_offsets_continue_over_chunks() -> None:
    whole = complete(FakeEngine("xabc"), logprobs=1)["choices"][0]["logprobs"]
    assert whole["tokens"] == ["x", "ab", "c", "<eos>"] and whole["text_offset"] == [0, 1, 3, 4]
    assert whole["top_logprobs"][0] == {"<eos>": -0.5}
    chunks = events(FakeEngine("xabc"), "/v1/completions", {"prompt": "a", "logprobs": 1})
    assert [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]] == whole["text_offset"]


def test_of_alternatives_with_one_text_the_likeliest_is_shown() -> None:
    """Parts of characters all read U+FFFD."""
    tokenizer = FakeEngine().tokenizer
    one, two, *_ = (token for token in range(256) if tokenizer.token_text(token) == "\ufffd")
    item = TokenLogprob(token_id=one, logprob=-0.1, top=((one, -0.1), (two, -2.0)))
    assert completion_logprobs(tokenizer, [item], offset=0)["top_logprobs"] == [{"\ufffd": -0.1}]


def test_stop_strings_end_the_answer() -> None:
    choice = complete(FakeEngine("abcdef"), stop=["de"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "de")
    assert complete(FakeEngine("abcdef"), max_tokens=2)["choices"][0]["finish_reason"] == "length"


# -- tools and schemas --------------------------------------------------------------------------------------------


def test_tool_calls_are_read_back() -> None:
    engine = FakeEngine(f"<tool_call>{CALL}</tool_call>")
    choice = chat(engine, tools=TOOLS)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "look", "arguments": '{"at": "x"}'}
    assert "look" in engine.tokenizer.decode(engine.requests[0].prompt_token_ids), "the template has no tools"


def test_tool_calls_stream() -> None:
    chunks = chat_events(
        FakeEngine(f"Wait.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"), tools=TOOLS
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait.\n"
    assert [call["index"] for call in calls] == [0, 1] and calls[0]["function"]["name"] == "look"
    assert calls[0]["id"] != calls[1]["id"] and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_text_with_tools_stays_text() -> None:
    assert chat(FakeEngine(), tools=TOOLS)["choices"][0]["message"]["content"] == "Hello world"
    choice = chat(FakeEngine(CALL), tools=TOOLS, tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]


def test_required_and_named_tools_hold_the_answer_to_the_schema() -> None:
    parameters = {"type": "object", "properties": {"x": {"enum": ["x"]}}, "required": ["x"]}
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "look"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        found = chat(FakeEngine(), **fields)["choices"][0]
        (call,) = found["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": "x"} and call["function"]["name"] == "look"
        assert found["finish_reason"] == reason
        deltas = [c["choices"][0]["delta"] for c in chat_events(FakeEngine(), **fields)]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
        assert json.loads("".join(part["arguments"] for part in parts)) == {"x": "x"}
        assert [part["name"] for part in parts if "name" in part] == ["look"]


def test_json_schema_and_json_object() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert "x" in json.loads(chat(FakeEngine(), response_format=asked)["choices"][0]["message"]["content"])
    found = complete(FakeEngine(), response_format={"type": "json_object"}, max_tokens=50)["choices"][0]["text"]
    assert isinstance(json.loads(found), dict)


def test_schemas_are_compiled_off_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, threads = FakeEngine(), []
    build = GrammarCompiler._compile

    def watched(self: GrammarCompiler, schema: str) -> Grammar:
        threads.append(threading.get_ident())
        return build(self, schema)

    monkeypatch.setattr(GrammarCompiler, "_compile", watched)
    asked = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x", "y"]}}}
    choices = complete(engine, ["a", "b"], response_format=asked)["choices"]
    assert [choice["text"] in ('"x"', '"y"') for choice in choices] == [True, True]
    assert len(threads) == 1 and engine.threads.isdisjoint(threads)


# -- control ------------------------------------------------------------------------------------------------------


def test_models_health_version_and_facts() -> None:
    async def work(client: httpx.AsyncClient) -> list[Json]:
        paths = ("/v1/models", "/v1/models/fake", "/health", "/version", "/server_info")
        return [(await client.get(path)).json() for path in paths]

    models, model, health, version, info = served(FakeEngine(), work)
    assert models["data"] == [model] and model["id"] == "fake" and model["max_model_len"] == 500
    assert health == {"status": "ok", "active_requests": 0} and version["version"]
    assert info["target_digest"] == "abc" and info["packages"]["torch"] and info["chat_template_hash"]


def test_policy_is_read_and_changed() -> None:
    async def work(client: httpx.AsyncClient) -> tuple[Json, Json, httpx.Response, Json]:
        before = (await client.get("/v1/speculation")).json()
        changed = (await client.post("/v1/speculation", json={"policy": "off"})).json()
        wrong = await client.post("/v1/speculation", json={"policy": "of"})
        return before, changed, wrong, (await client.get("/v1/speculation")).json()

    before, changed, wrong, after = served(FakeEngine(), work)
    assert (before["policy"], changed["policy"], after["policy"]) == ("auto", "off", "off")
    assert before["plan"] == {"text": "off", "depth": 0, "topk": 1, "rows": 0} and changed.keys() == before.keys()
    assert before["beliefs"]["acceptance"] == [0.5] and "depth" not in before
    assert wrong.status_code == 400 and "did you mean 'off'" in wrong.json()["error"]["message"]


def test_the_prefix_cache_is_reset_on_the_engines_thread() -> None:
    engine = FakeEngine()

    async def work(client: httpx.AsyncClient) -> int:
        await client.post("/v1/completions", json={"prompt": "a"})
        return (await client.post("/reset_prefix_cache")).status_code

    assert served(engine, work) == 200
    assert engine.num_resets == 1 and len(engine.threads) == 1


def test_metrics_parse_and_count() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async def work(client: httpx.AsyncClient) -> str:
        await client.post("/v1/completions", json={"prompt": "a"})
        return (await client.get("/metrics")).text

    samples = {
        (s.name, s.labels.get("position", s.labels.get("part", s.labels.get("finished_reason")))): s.value
        for family in text_string_to_metric_families(served(FakeEngine(), work))
        for s in family.samples
        if "le" not in s.labels
    }
    assert samples["wingbeat:request_success_total", "stop"] == 1
    assert samples["wingbeat:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert samples["wingbeat:step_time_seconds_total", "draft"] == 0.5
    assert samples["wingbeat:time_to_first_token_seconds_count", None] == 1
    assert samples["wingbeat:inter_token_latency_seconds_count", None] == 5
