"""Tool calls read back from text, streamed in any pieces; schemas; tools told to templates without a place for them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.text.grammar import GrammarCompiler
from wingbeat.text.test_detokenize import TOKENIZER
from wingbeat.text.tool_calls import ToolCall, ToolCallReader, calls_schema, read_calls, with_tools_inline

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}}}
WEATHER["parameters"] |= {"required": ["city"], "$defs": {"City": {"enum": ["Paris"]}}}
PARIS = ToolCall("weather", '{"city": "Paris"}')
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def read(text: str, cuts: list[int] | None = None) -> tuple[str, list[ToolCall]]:
    reader, out, calls = ToolCallReader(["weather"]), "", []
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    parts = [reader.feed(text[a:b]) for a, b in pairwise(edges)]
    for parsed in [*parts, reader.finish()]:
        out += parsed.text
        calls.extend(parsed.calls)
    return out, calls


CASES = [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    (f"Let me look.\n<tool_call>{CALL}</tool_call>", "Let me look.\n", 1),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "\n", 2),
    (f"<tool_call>{CALL}", "", 1),
    (CALL, "", 1),
    (f"  [{CALL}, {CALL}]\n", "", 2),
    (f"```json\n{CALL}\n```", "", 1),
    ("Just text with a < sign.", "Just text with a < sign.", 0),
    ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
    ('{"answer": 4}', '{"answer": 4}', 0),
    ("<tool_call>not json</tool_call> then text", "<tool_call>not json</tool_call> then text", 0),
    (f"An example: {CALL}", f"An example: {CALL}", 0),
    ("", "", 0),
]


@pytest.mark.parametrize(("text", "plain", "num_calls"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_calls_are_found_however_the_text_is_cut(text: str, plain: str, num_calls: int, cuts: list[int]) -> None:
    assert read(text, cuts) == (plain, [PARIS] * num_calls)


def test_plain_text_flows_and_a_call_leaves_when_complete() -> None:
    reader = ToolCallReader(["weather"])
    assert reader.feed("Hello <tool").text == "Hello "
    assert reader.feed("_box> ").text == "<tool_box> "
    assert reader.feed(f"<tool_call>{CALL}") == reader.feed("")
    assert reader.feed("</tool_call>").calls == (PARIS,)


def test_parameters_and_openai_records_are_calls_too() -> None:
    assert read_calls('{"name": "f", "parameters": {}}') == [ToolCall("f", "{}")]
    assert read_calls('{"function": {"name": "f", "arguments": "{}"}}') == [ToolCall("f", "{}")]
    assert read_calls('[{"name": "f", "arguments": {}}, 3]') == []


def test_required_schema_takes_calls_and_nothing_else() -> None:
    grammar = GrammarCompiler(TOKENIZER).compile(json.dumps(calls_schema([WEATHER], max_calls=1)))

    def fits(text: str) -> bool:
        matcher = grammar.matcher()
        matcher.advance(TOKENIZER.encode(text))
        return matcher.is_complete()

    assert fits(f"[{CALL}]")
    assert not fits("[]") and not fits(f"[{CALL}, {CALL}]")
    assert not fits('[{"name": "weather", "arguments": {"city": "Rome"}}]')
    assert not fits('[{"name": "other", "arguments": {}}]')


def test_templates_without_tools_get_them_as_text() -> None:
    tool = {"type": "function", "function": WEATHER}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    told = with_tools_inline(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        [tool],
    )
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert str(told[0]["content"]).startswith("Be brief.") and json.dumps(tool) in str(told[0]["content"])
    assert read(str(told[2]["content"])) == ("", [PARIS])
    assert "sunny" in str(told[3]["content"])
