"""`wingbeat serve` as a process, on a tiny random target and drafter: what clients see of the real engine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from parity.draft_files import HIDDEN, RAW, draft_tensors, write
from wingbeat.cli.test_serve import CONFIG, model_directory, started

THRESHOLD = 4
MAX_LEN = 2048
PATIENCE_S = 30.0
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
VOCAB = int(str(CONFIG["vocab_size"]))


def target_files(directory: Path) -> Path:
    """A target of the drafter's width, deep enough for its features; its weights are drawn at random."""
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 4, "max_position_embeddings": MAX_LEN}
    directory.mkdir()
    model_directory(directory).joinpath("config.json").write_text(json.dumps({**CONFIG, **shape}))
    return directory


def drafter_files(directory: Path) -> Path:
    tensors = draft_tensors()
    tensors["t2d"] = torch.nn.functional.pad(tensors["t2d"], (0, VOCAB - len(tensors["t2d"])))
    return write(directory, {**RAW, "vocab_size": VOCAB}, tensors)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    target, drafter = target_files(folder / "target"), drafter_files(folder / "drafter")
    flags = ("--load-format", "dummy", "--dtype", "float32", "--speculative-model", str(drafter))
    limit = ("--speculative-disable-batch-threshold", str(THRESHOLD))
    with started(str(target), *flags, *limit, "--served-model-name", "tiny", "--max-num-seqs", "8") as (_, found):
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as found:
        yield found


@contextmanager
def stream(url: str, prompt: str = "ab") -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of a long answer, of which some have come."""
    body = {"prompt": prompt, "max_tokens": MAX_LEN - 100, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        chunks = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        for _ in range(4):
            assert next(chunks)["choices"][0]["token_ids"]
        yield chunks


def metrics(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return {name: float(value) for name, value in re.findall(r"^wingbeat:(\w+){[^}]*} (\S+)", page, re.MULTILINE)}


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"


def settled(url: str, count: int) -> dict[str, Any]:
    """GET /v1/speculation once `count` sequences have run for a few steps in which none came or went."""
    wait_until(lambda: metrics(url)["num_requests_running"] == count)
    later = metrics(url)["engine_steps_total"] + 3
    wait_until(lambda: metrics(url)["engine_steps_total"] >= later)
    return httpx.get(f"{url}/v1/speculation", timeout=PATIENCE_S).json()


def test_the_threshold_switches_off_above_and_on_at_or_below(url: str) -> None:
    """Streams open and close, and the depth follows the number that runs, up and down, within each one's answer."""
    seen: list[tuple[int, int]] = []
    opened: list[ExitStack] = []
    for count in [1, 3, THRESHOLD, THRESHOLD + 1, 7, THRESHOLD, 2]:
        while len(opened) < count:
            opened.append(ExitStack())
            opened[-1].enter_context(stream(url))
        while len(opened) > count:
            opened.pop().close()
        state = settled(url, count)
        seen.append((state["num_running"], state["plan"]["depth"]))
    for each in opened:
        each.close()
    wait_until(lambda: metrics(url)["num_requests_running"] == 0)
    assert seen == [(1, 3), (3, 3), (4, 3), (5, 0), (7, 0), (4, 3), (2, 3)]


def test_a_client_that_leaves_frees_its_sequence_and_disturbs_nobody(url: str) -> None:
    with stream(url) as staying:
        with stream(url):
            assert settled(url, 2)["num_running"] == 2
        left_at = metrics(url)
        wait_until(lambda: metrics(url)["num_requests_running"] == 1)
        freed_at = metrics(url)
        next(staying)
    assert freed_at["engine_steps_total"] - left_at["engine_steps_total"] < MAX_LEN / 20, "long before its answer ends"
    wait_until(lambda: metrics(url)["num_requests_running"] == 0)
    assert metrics(url)["kv_cache_pages_held"] == 0


def test_streamed_equals_whole_and_usage_counts_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    said = [choice.message.content for choice in whole.choices]
    assert said[0] != said[1] and whole.usage is not None
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    streamed = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == said
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == whole.usage.completion_tokens
    assert len(set(counts)) > 3, "usage goes along with the text"


def test_seeds_repeat_and_stops_end(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        return client.completions.create(model="tiny", prompt="ab", max_tokens=40, **fields).choices[0].text

    assert text(seed=1) == text(seed=1) != text(seed=2)
    free = text(temperature=0)
    stop = free[10:12]
    assert text(temperature=0, stop=[stop]) == free[: free.index(stop)]


def test_logprobs_are_those_of_the_likeliest_token(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="ab", max_tokens=5, temperature=0, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert len(found.token_logprobs) == 5
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert value == max(top.values()) < 0


def test_salts_keep_prompts_apart(client: openai.OpenAI) -> None:
    def cached(**salt: str) -> int:
        answer = client.completions.create(model="tiny", prompt="salted" * 20, max_tokens=1, extra_body=salt)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    first = [cached(), cached(cache_salt="a"), cached(cache_salt="b")]
    again = [cached(), cached(cache_salt="a"), cached(cache_salt="b")]
    assert first == [0, 0, 0] and min(again) >= 64


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("speculation", {"policy": "fancy"}, "policy='fancy' is not valid: expected one of off"),
        ("speculation", {"policy": "always:chain(99)"}, "policy='always:chain(99)' is not valid"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature=-1.0 is not valid: a number from 0"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens=0 is not valid: an integer >= 1"),
        ("completions", {"prompt": "x" * MAX_LEN}, f"at most {MAX_LEN - 1} tokens"),
        ("completions", {"prompt": "a", "cache_salt": ""}, "cache_salt='' is not valid"),
        ("completions", '{"prompt": ', "not valid JSON"),
    ],
)
def test_what_is_refused_is_named_and_the_engine_goes_on(url: str, path: str, body: object, said: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    headers, before = {"Content-Type": "application/json"}, httpx.get(f"{url}/v1/speculation").json()["policy"]
    response = httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 400 and said in response.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/speculation").json()["policy"] == before == f"threshold:{THRESHOLD}:chain(3)"
    again = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=PATIENCE_S)
    assert again.status_code == 200
