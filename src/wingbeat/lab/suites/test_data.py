"""The shipped suites: complete, balanced, ASCII, and no prompt nearly like another."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest

from wingbeat.lab.suites import SHIPPED, Prompt, load_suite
from wingbeat.lab.suites.load import DATA

KINDS = {
    "coding": {"write", "explain", "test", "refactor", "review", "convert", "debug", "document"},
    "agentic": {"tool_call", "shell_agent", "patch", "multi_turn"},
    "encyclopedic": {"place", "history", "biography", "science", "culture", "technology"},
}
NUM_PROMPTS = 64
FOLLOWERS = {
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"tool", "user"},
    "tool": {"assistant", "user"},
}
"""Role -> roles that may come next."""


def prompts(suite: str) -> tuple[Prompt, ...]:
    return load_suite(suite).prompts


def text_of(prompt: Prompt) -> str:
    return "\n".join(str(message["content"]) for message in prompt.messages)


def ngrams(text: str, size: int = 8) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}


@pytest.mark.parametrize("suite", SHIPPED)
def test_ids_count_up_and_name_their_suite(suite: str) -> None:
    assert [p.id for p in prompts(suite)] == [f"{suite}-{i:03d}" for i in range(1, NUM_PROMPTS + 1)]
    assert {p.domain for p in prompts(suite)} == {suite}


@pytest.mark.parametrize("suite", SHIPPED)
def test_files_are_ascii(suite: str) -> None:
    assert (DATA / f"{suite}.jsonl").read_bytes().isascii()
    assert all(text_of(p).isascii() for p in prompts(suite))


def test_no_prompt_is_nearly_like_another() -> None:
    grams = [(p.id, ngrams(text_of(p))) for suite in SHIPPED for p in prompts(suite)]
    near = [(a, b) for (a, ga), (b, gb) in combinations(grams, 2) if len(ga & gb) >= 0.5 * len(ga | gb)]
    assert near == []


@pytest.mark.parametrize("suite", SHIPPED)
def test_kinds_are_balanced_in_the_whole_and_in_a_prefix(suite: str) -> None:
    counts = Counter(p.kind for p in prompts(suite))
    assert set(counts) == KINDS[suite]
    assert max(counts.values()) <= 2 * min(counts.values())
    assert {p.kind for p in prompts(suite)[:16]} == KINDS[suite]


@pytest.mark.parametrize("suite", SHIPPED)
def test_conversations_end_where_the_assistant_speaks_next(suite: str) -> None:
    for prompt in prompts(suite):
        roles = [str(message["role"]) for message in prompt.messages]
        assert roles[0] in {"system", "user"}, prompt.id
        assert roles[-1] in {"user", "tool"}, prompt.id
        assert all(b in FOLLOWERS[a] for a, b in pairwise(roles)), prompt.id
        assert all(message["content"] for message in prompt.messages), prompt.id


def test_only_multi_turn_prompts_have_several_messages() -> None:
    for prompt in (p for suite in SHIPPED for p in prompts(suite)):
        several = range(3, 8) if prompt.kind == "multi_turn" else range(1, 2)
        assert len(prompt.messages) in several, prompt.id
