"""Suites: identity by content and order; mistakes are named by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wingbeat.errors import ConfigError, LabError
from wingbeat.lab.suites import load_suite


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def row(number: int, text: str = "hello") -> dict[str, object]:
    return {"id": f"p{number}", "domain": "d", "messages": [{"role": "user", "content": f"{text} {number}"}]}


def test_the_digest_sees_order_text_and_tools(tmp_path: Path) -> None:
    tools = row(1) | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    variants = [[row(0), row(1)], [row(1), row(0)], [row(0), row(1, "hello!")], [row(0), tools]]
    digests = [load_suite(write(tmp_path / f"{i}.jsonl", rows)).digest for i, rows in enumerate(variants)]
    assert len(set(digests)) == 4
    again = load_suite(write(tmp_path / "again.jsonl", variants[0]))
    assert again.digest == digests[0]
    assert again.identity.startswith("again@file:")
    assert [p.id for p in again.prompts] == ["p0", "p1"]


def test_unknown_names_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'agentic'"):
        load_suite("agentc")
    with pytest.raises(LabError, match="does not exist"):
        load_suite(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a", "messages": []}\n', ":1: messages"),
        ('{"id": "a", "messages": [{"role": "user"}]}\nnot json\n', ":2: "),
        ('{"messages": [{"role": "user"}]}\n', ":1: id"),
        ('{"id": "a", "messages": [{}]}\n{"id": "a", "messages": [{}]}\n', "'a' appears twice"),
        ("\n", "holds no prompts"),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LabError, match=words):
        load_suite(str(path))
